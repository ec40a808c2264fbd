//! Runs the real `claude` hermetically.
