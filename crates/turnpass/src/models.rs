//! Models: names, ceilings, effort levels, and the catalogue for when discovery fails.

use crate::error::{Error, ErrorCode, Result};
use crate::request::ModelId;

/// Longest model id, in bytes. Real ones have about 30; the command line and error texts hold it whole.
pub const MODEL_ID_BYTES: usize = 256;

/// Refuses what cannot be a model id, before anything is started. Unknown names pass: the service knows more models
/// than we do.
///
/// # Errors
///
/// `request_invalid` that says what is wrong.
pub fn check_model_id(model: &ModelId) -> Result<()> {
    let id = &model.0;
    let wrong = if id.is_empty() {
        "is empty"
    } else if id.len() > MODEL_ID_BYTES {
        "is too long"
    } else if id.starts_with('-') {
        "looks like an option"
    } else if !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        "holds a character that no model id has"
    } else {
        return Ok(());
    };
    Err(Error::new(
        ErrorCode::RequestInvalid,
        format!("the model id {wrong}"),
    ))
}

/// x
pub fn check_effort(_model: &ModelId, _effort: Option<crate::request::Effort>) -> Result<()> {
    Ok(())
}

/// x
pub fn check_context(
    _model: &ModelId,
    _messages: &[crate::conversation::Message],
    _bytes: usize,
    _system: &str,
) -> Result<()> {
    Ok(())
}
