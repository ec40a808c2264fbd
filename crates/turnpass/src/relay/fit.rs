//! What a kept process is set to, and what has to be said to it so that it fits the next generation. Pure.
//!
//! One write changes prompt, model, effort, tools and settings of a live process, and the user line behind it already
//! has them all (12 of 12 on 2.1.294, 2.1.310 and 2.1.332), for 5 to 10 ms over a generation without a change. The
//! prompt goes by `set_model` without a model, which falls back to the default model and never asks the service; the
//! model follows by `apply_flag_settings`, which accepts any id.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::request::{Effort, Sampling, ThinkingDisplay, ToolChoice};

/// What can be changed on a live process.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    /// As the host wrote it.
    pub(crate) model: String,
    /// `None` for the model's default; never [`Effort::None`], which is in `extra`.
    pub(crate) effort: Option<Effort>,
    /// Not empty; a process without a prompt has its own [`Key`].
    pub(crate) system: String,
    /// The JSON text of the CLI's extra-body setting.
    pub(crate) extra: String,
}

impl std::fmt::Debug for Fit {
    /// Without the prompt and the tools: what passes through a relay is in no log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fit")
            .field("model", &self.model)
            .field("effort", &self.effort)
            .field("system_bytes", &self.system.len())
            .field("extra_bytes", &self.extra.len())
            .finish()
    }
}

/// What cannot be changed on a live process: one that differs here does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The executable and its version, so that an update is seen.
    pub(crate) program: String,
    /// Asked for at launch.
    pub(crate) thinking: ThinkingDisplay,
    /// A live process refuses an empty prompt (all three versions).
    pub(crate) has_system: bool,
    /// Digest of the tools that are published in-band; empty when they travel in the extra body.
    pub(crate) in_band: String,
}

/// What makes the difference, cheapest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Distance {
    /// The prompt differs: two requests.
    prompt: bool,
    /// Anything else differs: one request.
    settings: bool,
}

/// One control request that changes a live process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refit<'a> {
    /// `set_model` without a model.
    Prompt(&'a str),
    /// `apply_flag_settings`.
    Settings(Value),
}

impl Fit {
    /// How far a process is from what is wanted.
    pub(crate) fn distance(&self, wanted: &Self) -> Distance {
        let prompt = self.system != wanted.system;
        let settings = (&self.model, self.effort, &self.extra)
            != (&wanted.model, wanted.effort, &wanted.extra);
        Distance { prompt, settings }
    }

    /// The control requests that make a process set to `from` fit, in order; none when it fits. `None` is a process
    /// that was told nothing yet.
    pub(crate) fn refit(&self, from: Option<&Self>) -> Vec<Refit<'_>> {
        let prompt = from.is_none_or(|from| from.system != self.system);
        if !prompt && from.is_some_and(|from| from.distance(self) == Distance::default()) {
            return Vec::new();
        }
        let mut requests = Vec::new();
        if prompt && !self.system.is_empty() {
            requests.push(Refit::Prompt(&self.system));
        }
        // Every key is sent each time: what is left out keeps its old value.
        requests.push(Refit::Settings(json!({
            "model": self.model,
            "effortLevel": self.effort.map(Effort::as_str),
            "env": {"CLAUDE_CODE_EXTRA_BODY": self.extra},
        })));
        requests
    }
}

/// Chooses among idle processes: the one of the same conversation if it fits as well as any, else the nearest, and of
/// equals the one used last, so that the others may grow old and end.
pub(crate) fn choose<'a>(
    idle: impl Iterator<Item = (&'a Key, Option<&'a Fit>, bool)>,
    key: &Key,
    wanted: &Fit,
) -> Option<usize> {
    let unset = Distance {
        prompt: true,
        settings: true,
    };
    idle.enumerate()
        .filter(|(_, (has, ..))| *has == key)
        .map(|(index, (_, fit, same))| {
            (fit.map_or(unset, |fit| fit.distance(wanted)), !same, index)
        })
        .min_by_key(|(distance, other, index)| (*distance, *other, std::cmp::Reverse(*index)))
        .map(|(.., index)| index)
}

/// The fields beside the tools that a request adds to the CLI's own body: sampling, and thinking switched off.
pub(crate) fn extra_body(
    sampling: &Sampling,
    effort: Option<Effort>,
    published: impl Fn(&str) -> String,
) -> Map<String, Value> {
    let mut extra = Map::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            extra.insert(key.to_owned(), value);
        }
    };
    set(
        "tool_choice",
        sampling
            .tool_choice
            .as_ref()
            .map(|choice| tool_choice(choice, published)),
    );
    set("max_tokens", sampling.max_tokens.map(Value::from));
    set(
        "stop_sequences",
        (!sampling.stop_sequences.is_empty()).then(|| json!(sampling.stop_sequences)),
    );
    set("temperature", sampling.temperature.map(Value::from));
    set("top_p", sampling.top_p.map(Value::from));
    set("top_k", sampling.top_k.map(Value::from));
    set(
        "thinking",
        (effort == Some(Effort::None)).then(|| json!({"type": "disabled"})),
    );
    // The CLI thinks that it thinks, and asks for its edits of earlier thinking. The service answers 400 to that when
    // thinking is off ("clear_thinking_20251015 strategy requires thinking to be enabled or adaptive").
    set(
        "context_management",
        (effort == Some(Effort::None)).then(|| json!({"edits": []})),
    );
    if let Some(schema) = &sampling.output_schema {
        let mut config = Map::new();
        if let Some(effort) = effort.filter(|effort| *effort != Effort::None) {
            config.insert("effort".to_owned(), effort.as_str().into());
        }
        config.insert(
            "format".to_owned(),
            json!({"type": "json_schema", "schema": schema}),
        );
        extra.insert("output_config".to_owned(), config.into());
    }
    extra
}

/// The text of the extra-body setting. It stays until it is changed, so it is sent whole each time; `{}` clears it (all
/// three versions).
pub(crate) fn extra_body_text(tools: Option<&RawValue>, fields: &Map<String, Value>) -> String {
    #[derive(serde::Serialize)]
    struct Extra<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        tools: Option<&'a RawValue>,
        #[serde(flatten)]
        fields: &'a Map<String, Value>,
    }
    // Keys are texts and the writer is memory, so this cannot fail; an empty text clears as well.
    serde_json::to_string(&Extra { tools, fields }).unwrap_or_default()
}

fn tool_choice(choice: &ToolChoice, published: impl Fn(&str) -> String) -> Value {
    let with = |kind: &str, name: Option<&str>, single: bool| {
        let mut map = Map::new();
        map.insert("type".to_owned(), kind.into());
        if let Some(name) = name {
            map.insert("name".to_owned(), published(name).into());
        }
        if single {
            map.insert("disable_parallel_tool_use".to_owned(), true.into());
        }
        Value::Object(map)
    };
    match choice {
        ToolChoice::Auto {
            disable_parallel_tool_use,
        } => with("auto", None, *disable_parallel_tool_use),
        ToolChoice::Any {
            disable_parallel_tool_use,
        } => with("any", None, *disable_parallel_tool_use),
        ToolChoice::Tool {
            name,
            disable_parallel_tool_use,
        } => with("tool", Some(name), *disable_parallel_tool_use),
        ToolChoice::None => with("none", None, false),
    }
}

/// Whether a value that the CLI passed on is the one it was given. The CLI reads numbers as JavaScript does, so `1.0`
/// comes out as `1`.
pub(crate) fn same_value(given: &Value, arrived: &Value) -> bool {
    match (given, arrived) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| same_value(a, b)))
        }
        _ => given == arrived,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit() -> Fit {
        Fit {
            model: "sonnet".into(),
            effort: Some(Effort::High),
            system: "S".into(),
            extra: "{}".into(),
        }
    }

    fn key() -> Key {
        Key {
            program: "claude 2.1.332".into(),
            thinking: ThinkingDisplay::Summarized,
            has_system: true,
            in_band: String::new(),
        }
    }

    #[test]
    fn a_process_that_fits_is_told_nothing() {
        assert!(fit().refit(Some(&fit())).is_empty());
    }

    #[test]
    fn the_prompt_comes_first_and_the_model_always_follows_it() {
        let (wanted, from) = (
            fit(),
            Fit {
                system: "old".into(),
                ..fit()
            },
        );
        let requests = wanted.refit(Some(&from));
        assert_eq!(requests[0], Refit::Prompt("S"));
        let Refit::Settings(settings) = &requests[1] else {
            panic!("{requests:?}")
        };
        assert_eq!(
            (&settings["model"], &settings["effortLevel"]),
            (&json!("sonnet"), &json!("high"))
        );
        assert_eq!(settings["env"], json!({"CLAUDE_CODE_EXTRA_BODY": "{}"}));
        assert_eq!(requests.len(), 2);
    }

    #[test]
    fn anything_else_takes_one_request_with_every_key() {
        for from in [
            Fit {
                model: "opus".into(),
                ..fit()
            },
            Fit {
                effort: None,
                ..fit()
            },
            Fit {
                extra: "{\"max_tokens\":1}".into(),
                ..fit()
            },
        ] {
            let wanted = fit();
            let requests = wanted.refit(Some(&from));
            assert!(
                matches!(&requests[..], [Refit::Settings(all)] if all.as_object().unwrap().len() == 3)
            );
        }
        let wanted = Fit {
            effort: None,
            ..fit()
        };
        let cleared = wanted.refit(Some(&fit()));
        assert!(matches!(&cleared[..], [Refit::Settings(all)] if all["effortLevel"].is_null()));
    }

    #[test]
    fn a_new_process_is_told_everything() {
        assert_eq!(fit().refit(None).len(), 2);
        assert_eq!(
            Fit {
                system: String::new(),
                ..fit()
            }
            .refit(None)
            .len(),
            1
        );
    }

    #[test]
    fn the_nearest_fitting_process_is_chosen() {
        let (good, near, far) = (
            fit(),
            Fit {
                model: "opus".into(),
                ..fit()
            },
            Fit {
                system: "x".into(),
                ..fit()
            },
        );
        let other = Key {
            in_band: "d".into(),
            ..key()
        };
        let pick =
            |idle: &[(&Key, Option<&Fit>, bool)]| choose(idle.iter().copied(), &key(), &fit());
        let own = key();
        assert_eq!(pick(&[]), None);
        assert_eq!(
            pick(&[(&other, Some(&good), true)]),
            None,
            "the key has to be the same"
        );
        assert_eq!(
            pick(&[
                (&own, None, false),
                (&own, Some(&far), false),
                (&own, Some(&near), false)
            ]),
            Some(2)
        );
        assert_eq!(
            pick(&[(&own, Some(&good), false), (&own, Some(&near), true)]),
            Some(0),
            "fit before conversation"
        );
        assert_eq!(
            pick(&[(&own, Some(&good), true), (&own, Some(&good), false)]),
            Some(0),
            "then the same conversation"
        );
        assert_eq!(
            pick(&[(&own, Some(&good), false), (&own, Some(&good), false)]),
            Some(1),
            "then the one used last"
        );
    }

    #[test]
    fn bug_113_every_setting_of_the_request_is_in_the_extra_body() {
        let sampling = Sampling {
            max_tokens: Some(10),
            stop_sequences: vec!["END".into()],
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(5),
            tool_choice: Some(ToolChoice::Tool {
                name: "read".into(),
                disable_parallel_tool_use: true,
            }),
            output_schema: Some(json!({"type": "object"})),
        };
        let extra = extra_body(&sampling, Some(Effort::Low), |name| format!("p_{name}"));
        let tools = RawValue::from_string("[{\"name\":\"t\",\"n\":1.0}]".into()).unwrap();
        assert!(
            extra_body_text(Some(&tools), &extra)
                .starts_with("{\"tools\":[{\"name\":\"t\",\"n\":1.0}],\"tool_choice\"")
        );
        assert_eq!(
            Value::Object(extra),
            json!({
                "tool_choice": {"type": "tool", "name": "p_read", "disable_parallel_tool_use": true},
                "max_tokens": 10, "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
                "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            })
        );
        assert!(extra_body(&Sampling::default(), None, str::to_owned).is_empty());
        assert_eq!(extra_body_text(None, &Map::new()), "{}");
        let off = extra_body(&Sampling::default(), Some(Effort::None), str::to_owned);
        assert_eq!(
            Value::Object(off),
            json!({"thinking": {"type": "disabled"}, "context_management": {"edits": []}})
        );
    }

    #[test]
    fn numbers_are_compared_as_the_cli_reads_them() {
        assert!(same_value(
            &json!({"a": [1.0, "x"]}),
            &json!({"a": [1, "x"]})
        ));
        assert!(!same_value(&json!({"a": 1}), &json!({"a": 1, "b": 2})));
        assert!(!same_value(&json!([1]), &json!([2])));
    }
}
