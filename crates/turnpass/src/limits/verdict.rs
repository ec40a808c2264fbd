//! What one answer to `get_usage` says about paid credits. Pure.
//!
//! A message may go only if two things are certain: that the limits of a subscription are shown at all, and that credits
//! cannot cover what goes beyond them. `utilization`, `disabled_reason`, amounts and limits are not consulted: they tell
//! how much, and the question is whether.

use std::fmt;

use serde_json::{Map, Value};

/// What an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// `rate_limits_available` is true and `extra_usage.is_enabled` is false: credits are off.
    Off,
    /// `extra_usage.is_enabled` is true: credits are on.
    On,
    /// Neither is certain.
    Unconfirmed(Doubt),
}

/// Why an answer confirms nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The CLI refused the question or gave no answer that can be used.
    NoAnswer,
    /// The answer is empty, no JSON or no object.
    Undecodable,
    /// The flag that says that limits are shown. False for a key, another backend, and a token without profile scope.
    RateLimitsAvailable(Shape),
    /// The limits. Null while the usage endpoint refuses, fails or is late (2.1.332).
    RateLimits(Shape),
    /// The entry about credits. Missing in an answer that was made up from response headers (2.1.332).
    ExtraUsage(Shape),
    /// The flag itself.
    IsEnabled(Shape),
}

/// What is there in place of what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Nothing.
    Missing,
    /// A null.
    Null,
    /// The boolean false where true is wanted.
    False,
    /// A value of another type.
    WrongType,
}

impl Verdict {
    /// Reads the payload of an answer; the empty text for an answer without one.
    pub fn read(json: &str) -> Self {
        let Ok(Value::Object(answer)) = serde_json::from_str(json) else {
            return Self::Unconfirmed(Doubt::Undecodable);
        };
        let credits = credits(&answer);
        if credits == Ok(true) {
            // Outranks everything else: nothing that is missing beside it makes it less so.
            return Self::On;
        }
        match available(&answer).and(credits) {
            Ok(_) => Self::Off,
            Err(doubt) => Self::Unconfirmed(doubt),
        }
    }
}

fn available(answer: &Map<String, Value>) -> Result<(), Doubt> {
    match answer.get("rate_limits_available") {
        Some(Value::Bool(true)) => Ok(()),
        other => Err(Doubt::RateLimitsAvailable(shape(other))),
    }
}

fn credits(answer: &Map<String, Value>) -> Result<bool, Doubt> {
    let limits = object(answer.get("rate_limits")).map_err(Doubt::RateLimits)?;
    let extra = object(limits.get("extra_usage")).map_err(Doubt::ExtraUsage)?;
    match extra.get("is_enabled") {
        Some(Value::Bool(enabled)) => Ok(*enabled),
        other => Err(Doubt::IsEnabled(shape(other))),
    }
}

fn object(value: Option<&Value>) -> Result<&Map<String, Value>, Shape> {
    match value {
        Some(Value::Object(object)) => Ok(object),
        other => Err(shape(other)),
    }
}

fn shape(value: Option<&Value>) -> Shape {
    match value {
        None => Shape::Missing,
        Some(Value::Null) => Shape::Null,
        Some(Value::Bool(false)) => Shape::False,
        Some(_) => Shape::WrongType,
    }
}

impl Doubt {
    /// Whether the CLI says that it has no limits to show at all, as it does when it is signed out. A partial answer is
    /// no such word: somebody who is signed in got it.
    pub fn is_not_ready(self) -> bool {
        matches!(self, Self::RateLimitsAvailable(_) | Self::RateLimits(_))
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, shape) = match self {
            Self::NoAnswer => return f.write_str("the CLI gave no answer about usage"),
            Self::Undecodable => {
                return f.write_str("the CLI's answer about usage cannot be decoded");
            }
            Self::RateLimitsAvailable(shape) => ("rate_limits_available", shape),
            Self::RateLimits(shape) => ("rate_limits", shape),
            Self::ExtraUsage(shape) => ("rate_limits.extra_usage", shape),
            Self::IsEnabled(shape) => ("rate_limits.extra_usage.is_enabled", shape),
        };
        write!(f, "in the CLI's answer about usage, {what} {shape}")
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "is missing",
            Self::Null => "is null",
            Self::False => "is false",
            Self::WrongType => "is of another type",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn answer(available: Value, limits: Value) -> Value {
        json!({"rate_limits_available": available, "rate_limits": limits})
    }

    fn extra(extra: Value) -> Value {
        answer(json!(true), json!({"extra_usage": extra}))
    }

    fn enabled(enabled: Value) -> Value {
        extra(json!({"is_enabled": enabled}))
    }

    fn read(value: &Value) -> Verdict {
        Verdict::read(&value.to_string())
    }

    /// One row for each shape of `value`, wrapped by `wrap`, that is none of `wanted`.
    fn shapes(
        wrap: impl Fn(Value) -> Value,
        doubt: impl Fn(Shape) -> Doubt,
        values: &[(Value, Shape)],
    ) {
        for (value, shape) in values {
            let wanted = Verdict::Unconfirmed(doubt(*shape));
            assert_eq!(read(&wrap(value.clone())), wanted, "{value}");
        }
    }

    #[test]
    fn rule_3_it_passes_only_with_available_true_and_enabled_false() {
        assert_eq!(read(&enabled(json!(false))), Verdict::Off);
    }

    #[test]
    fn rule_3_amounts_and_reasons_are_not_consulted() {
        for used in [
            json!(0),
            json!(100),
            json!(99999),
            Value::Null,
            json!("all"),
        ] {
            let rest = |on: bool| {
                extra(
                    json!({"is_enabled": on, "utilization": used, "used_credits": used,
                    "monthly_limit": used, "disabled_reason": "out_of_credits", "currency": used}),
                )
            };
            assert_eq!(read(&rest(false)), Verdict::Off);
            assert_eq!(read(&rest(true)), Verdict::On);
        }
    }

    #[test]
    fn rule_4_enabled_true_is_definitive_whatever_else_is_missing() {
        assert_eq!(read(&enabled(json!(true))), Verdict::On);
        for available in [json!(false), Value::Null, json!("yes")] {
            let on = answer(available, json!({"extra_usage": {"is_enabled": true}}));
            assert_eq!(read(&on), Verdict::On);
        }
    }

    #[test]
    fn rule_8_a_sign_in_without_profile_scope_never_passes() {
        // `claude setup-token`, a key, another backend: limits are not shown, whatever stands beside that.
        for limits in [
            json!({"extra_usage": {"is_enabled": false}}),
            json!({"five_hour": {"utilization": 0}, "extra_usage": null}),
            Value::Null,
        ] {
            let read = read(&answer(json!(false), limits));
            let wanted = Doubt::RateLimitsAvailable(Shape::False);
            assert_eq!(read, Verdict::Unconfirmed(wanted));
        }
    }

    #[test]
    fn rule_4_undecodable_or_empty_is_unconfirmed() {
        for text in ["", " ", "{", "null", "[]", "true", "\"off\"", "3", "{}}"] {
            let wanted = Verdict::Unconfirmed(Doubt::Undecodable);
            assert_eq!(Verdict::read(text), wanted, "{text:?}");
        }
        assert_eq!(
            Verdict::read("{}"),
            Verdict::Unconfirmed(Doubt::RateLimitsAvailable(Shape::Missing))
        );
    }

    #[test]
    fn rule_4_available_missing_null_false_or_of_another_type_is_unconfirmed() {
        let off = json!({"extra_usage": {"is_enabled": false}});
        assert_eq!(
            read(&json!({"rate_limits": off})),
            Verdict::Unconfirmed(Doubt::RateLimitsAvailable(Shape::Missing))
        );
        shapes(
            |value| answer(value, off.clone()),
            Doubt::RateLimitsAvailable,
            &[
                (Value::Null, Shape::Null),
                (json!(false), Shape::False),
                (json!("true"), Shape::WrongType),
                (json!(1), Shape::WrongType),
                (json!({}), Shape::WrongType),
            ],
        );
    }

    #[test]
    fn rule_4_limits_missing_null_or_of_another_type_are_unconfirmed() {
        assert_eq!(
            read(&json!({"rate_limits_available": true})),
            Verdict::Unconfirmed(Doubt::RateLimits(Shape::Missing))
        );
        shapes(
            |value| answer(json!(true), value),
            Doubt::RateLimits,
            &[
                (Value::Null, Shape::Null),
                (json!([]), Shape::WrongType),
                (json!("none"), Shape::WrongType),
            ],
        );
    }

    #[test]
    fn rule_4_extra_usage_missing_null_or_of_another_type_is_unconfirmed() {
        // Missing is the answer that a running CLI makes up from response headers (2.1.332).
        assert_eq!(
            read(&answer(
                json!(true),
                json!({"five_hour": {"utilization": 3}})
            )),
            Verdict::Unconfirmed(Doubt::ExtraUsage(Shape::Missing))
        );
        shapes(
            extra,
            Doubt::ExtraUsage,
            &[
                (Value::Null, Shape::Null),
                (json!(false), Shape::False),
                (json!([false]), Shape::WrongType),
            ],
        );
    }

    #[test]
    fn rule_4_enabled_missing_null_or_no_boolean_is_unconfirmed() {
        assert_eq!(
            read(&extra(json!({}))),
            Verdict::Unconfirmed(Doubt::IsEnabled(Shape::Missing))
        );
        shapes(
            enabled,
            Doubt::IsEnabled,
            &[
                (Value::Null, Shape::Null),
                (json!("false"), Shape::WrongType),
                (json!(0), Shape::WrongType),
                (json!([]), Shape::WrongType),
            ],
        );
    }

    #[test]
    fn only_an_answer_without_any_limits_is_not_ready() {
        for (doubt, wanted) in [
            (Doubt::RateLimitsAvailable(Shape::False), true),
            (Doubt::RateLimits(Shape::Null), true),
            (Doubt::ExtraUsage(Shape::Missing), false),
            (Doubt::IsEnabled(Shape::Null), false),
            (Doubt::Undecodable, false),
            (Doubt::NoAnswer, false),
        ] {
            assert_eq!(doubt.is_not_ready(), wanted, "{doubt}");
        }
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[a-z]{0,5}".prop_map(Value::from),
        ];
        let name = prop_oneof![
            Just("rate_limits_available".to_owned()),
            Just("rate_limits".to_owned()),
            Just("extra_usage".to_owned()),
            Just("is_enabled".to_owned()),
            "[a-z]{1,4}",
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                proptest::collection::btree_map(name.clone(), inner, 0..5)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn whatever_comes_it_passes_only_with_both_booleans(value in any_value()) {
            let sure = value["rate_limits_available"] == json!(true)
                && value["rate_limits"]["extra_usage"]["is_enabled"] == json!(false);
            prop_assert_eq!(read(&value) == Verdict::Off, sure);
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,80}") {
            prop_assert_ne!(Verdict::read(&text), Verdict::On);
        }
    }
}
