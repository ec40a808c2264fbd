//! A request made ready: everything that can be wrong with it is found here, before anything is started or spent. Pure.

use super::keys::{self, Key};
use super::launcher::Shape;
use super::sync::Settings;
use super::ways::Ways;
use crate::conversation::digest::Digest;
use crate::conversation::names;
use crate::conversation::normalise::{NormaliseOptions, Normalised, normalise};
use crate::error::Result;
use crate::models;
use crate::relay::fit::{self, Fit};
use crate::relay::prepared;
use crate::request::{Effort, Limits, Request};
use crate::tools::Catalogue;
use crate::turn::ToolNames;

/// A request that may be sent.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    pub(crate) request: &'a Request,
    pub(crate) key: Key,
    pub(crate) persists: bool,
    shape: Shape,
    pub(crate) fit: Fit,
    /// Whether the body of its requests is to have settings of the host's.
    pub(crate) has_extra: bool,
    pub(crate) catalogue: Catalogue,
    pub(crate) history: Normalised<'a>,
    pub(crate) limits: Limits,
}

impl<'a> Prepared<'a> {
    /// Checks a request.
    ///
    /// # Errors
    ///
    /// `request_invalid`, `tool_*`, `effort_unsupported`, `history_too_large` or `context_length_exceeded`.
    pub(crate) fn new(request: &'a Request) -> Result<Self> {
        prepared::check(request)?;
        let catalogue = Catalogue::build(&request.tools)?;
        let published = |host: &str| names::published(host).unwrap_or_else(|_| host.to_owned());
        let fields = fit::extra_body(&request.sampling, request.effort, published);
        let options = NormaliseOptions {
            leave_out_thinking_alone: true,
            ..NormaliseOptions::default()
        };
        let history = normalise(&request.messages, &options)?;
        let persists = keys::persists(request);
        Ok(Self {
            key: Key::of(request),
            persists,
            shape: Shape::of(request, keys::is_on_disk(request)),
            fit: Fit {
                model: request.model.0.clone(),
                effort: request.effort.filter(|effort| *effort != Effort::None),
                system: request.system.clone(),
                extra: fit::extra_body_text(None, &fields),
            },
            has_extra: !fields.is_empty(),
            catalogue,
            history,
            limits: prepared::bounded(request.limits),
            request,
        })
    }

    /// The process that it needs: with its effort, where that is fixed at the start.
    pub(crate) fn shape(&self, ways: &Ways) -> Shape {
        Shape {
            effort: self.fit.effort.filter(|_| !ways.sets_effort),
            ..self.shape.clone()
        }
    }

    /// What it is to be served with.
    pub(crate) fn settings(&self, ways: &Ways) -> Settings {
        let shape = self.shape(ways);
        let place = format!(
            "{:?} {:?} {:?} {} {:?}",
            shape.directory, shape.time_zone, shape.thinking, shape.persists, shape.effort
        );
        Settings {
            model: self.request.model.clone(),
            prompt: Digest::of(self.request.system.as_bytes()),
            tools: self.catalogue.digest(),
            effort: self.fit.effort,
            place: Digest::of(place.as_bytes()),
        }
    }

    /// Whether the conversation is surely above the model's ceiling; the CLI knows better what is below.
    ///
    /// # Errors
    ///
    /// `context_length_exceeded`.
    pub(crate) fn check_context(&self) -> Result<()> {
        let request = self.request;
        let tools = self.catalogue.request_json().get().len();
        let tokens = models::estimate_tokens(&request.system, tools, &request.messages);
        models::check_context(&request.model, tokens)
    }

    /// Maps published tool names back to the host's.
    pub(crate) fn tool_names(&self) -> ToolNames {
        let names = self.catalogue.names().clone();
        Box::new(move |published| names.resolve(published).host().map(str::to_owned))
    }
}
