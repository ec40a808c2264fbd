use proptest::prelude::*;
use serde_json::json;

use super::*;

fn id(text: &str) -> ModelId {
    ModelId::from(text)
}

#[test]
fn bug_028_what_cannot_be_a_model_id_is_refused() {
    for wrong in [
        "",
        " ",
        "a b",
        "a\0",
        "a\n",
        "é",
        "-p",
        "--settings",
        &"x".repeat(MODEL_ID_BYTES + 1),
    ] {
        let error = check_model_id(&id(wrong)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RequestInvalid, "{wrong:?}");
    }
    for right in [
        "sonnet",
        "opusplan",
        "claude-opus-5-5[1m]",
        "gpt-x",
        "a/b:c@1",
        &"x".repeat(MODEL_ID_BYTES),
    ] {
        check_model_id(&id(right)).unwrap();
    }
}

#[test]
fn names_are_taken_apart() {
    for (text, wanted) in [
        ("claude-opus-4-6", Some((Family::Opus, (4, 6), false))),
        ("claude-opus-4-6[1m]", Some((Family::Opus, (4, 6), true))),
        (
            "claude-opus-4-20250514",
            Some((Family::Opus, (4, 0), false)),
        ),
        (
            "claude-opus-4-1-20250805[1m]",
            Some((Family::Opus, (4, 1), true)),
        ),
        ("claude-fable-5", Some((Family::Fable, (5, 0), false))),
        ("claude-fable-5-1", Some((Family::Fable, (5, 1), false))),
        (
            "claude-haiku-4-5-20251001",
            Some((Family::Haiku, (4, 5), false)),
        ),
        (
            "claude-sonnet-10-11",
            Some((Family::Sonnet, (10, 11), false)),
        ),
        ("opus", None),
        ("opus[1m]", None),
        ("claude-opus", None),
        ("claude-opus-x", None),
        ("claude-opus-4-6-beta", None),
        ("claude-opus-4-6-20250101-2", None),
        ("claude-3-opus-20240229", None),
        ("claude-opus-4-6[1M]", None),
        ("claude-opus-4-6 [1m]", None),
        ("gpt-x", None),
        ("", None),
    ] {
        let name =
            ModelName::parse(&id(text)).map(|name| (name.family, name.version, name.extended));
        assert_eq!(name, wanted, "{text:?}");
    }
}

#[test]
fn the_relay_documents_ceilings() {
    for extended in [
        "claude-opus-4-6[1m]",
        "claude-opus-4-8[1m]",
        "claude-opus-4-10[1m]",
        "claude-opus-5[1m]",
        "claude-opus-5-5[1m]",
        "claude-opus-10[1m]",
        "claude-opus-4-6-20260101[1m]",
        "claude-fable-5[1m]",
        "claude-fable-5-1[1m]",
        "claude-fable-5-2[1m]",
    ] {
        assert_eq!(ceiling_tokens(&id(extended)), 1_000_000, "{extended}");
    }
    for other in [
        "claude-opus-5-5",
        "claude-fable-5-1",
        "claude-opus-4-5[1m]",
        "claude-fable-4-9[1m]",
        "claude-sonnet-5-5[1m]",
        "claude-haiku-5-5[1m]",
        "opus",
        "opus[1m]",
        "fable[1m]",
        "sonnet[1m]",
        "default",
        "unknown[1m]",
        "claude-opus-5-5[1m][1m]",
        "[1m]",
        "",
    ] {
        assert_eq!(ceiling_tokens(&id(other)), 202_000, "{other}");
    }
}

#[test]
fn what_can_bill_credits_is_marked() {
    let some = |text: &str| matches!(credits(&id(text)), Credits::OnSomePlans(_));
    let always = |text: &str| matches!(credits(&id(text)), Credits::Always(_));
    let no = |text: &str| credits(&id(text)) == Credits::No;
    assert!(some("fable") && some("claude-fable-5-2") && some("fable[1m]"));
    assert!(always("claude-sonnet-4-6[1m]") && always("claude-sonnet-4-5[1m]"));
    assert!(some("claude-opus-4-6[1m]") && some("sonnet[1m]") && some("unknown[1m]"));
    assert!(no("sonnet") && no("claude-opus-4-6") && no("claude-opus-5-5[1m]") && no("unknown"));
}

#[test]
fn the_fallback_follows_the_version() {
    let ids = |patch| {
        let catalog = fallback_catalog(Version::new(2, 1, patch));
        let pairs = catalog
            .into_iter()
            .map(|entry| format!("{}={}", entry.alias, entry.id));
        pairs.collect::<Vec<_>>().join(" ")
    };
    let old = "opus=claude-opus-5-5 fable=claude-fable-5-1 sonnet=claude-sonnet-5-5 haiku=claude-haiku-5-5";
    assert_eq!(ids(294), old);
    assert_eq!(ids(310), old);
    assert_eq!(ids(332), old.replace("fable-5-1", "fable-5-2"));
    assert_eq!(ids(400), ids(332));
}

#[test]
fn discovery_is_read_as_the_pool_document_says() {
    // 2.1.332, shortened.
    let levels = ["low", "medium", "high", "xhigh", "max", "brand_new"];
    let model = |value: &str, resolved: &str| {
        json!({"value": value, "resolvedModel": resolved, "displayName": value.to_uppercase(),
            "supportedEffortLevels": levels, "supportsThinkingOff": false})
    };
    let answer = json!({"models": [
        model("default", "claude-opus-5-5"),
        model("opus", "claude-opus-5-5"),
        model("opus-again", "claude-opus-5-5"),
        model("fable", "claude-fable-5-2"),
        {"value": "old", "resolvedModel": "claude-sonnet-4-5"},
    ]});
    let catalog = read_catalog(&answer).unwrap();
    let aliases: Vec<_> = catalog.iter().map(|entry| entry.alias.as_str()).collect();
    assert_eq!(aliases, ["opus", "fable", "old"]);
    assert_eq!(catalog[0].display_name, "OPUS");
    assert_eq!(catalog[0].efforts, LEVELS);
    assert!(!catalog[0].thinking_off);
    assert!(matches!(catalog[1].credits, Credits::OnSomePlans(_)));
    assert_eq!(
        (catalog[2].efforts.len(), catalog[2].thinking_off),
        (0, true)
    );
}

#[test]
fn discovery_that_cannot_be_pinned_fails() {
    for answer in [
        json!({}),
        json!({"models": {}}),
        json!({"models": [{"resolvedModel": "x"}]}),
        json!({"models": [{"value": "opus"}]}),
        json!({"models": [{"value": "opus", "resolvedModel": ""}]}),
    ] {
        let error = read_catalog(&answer).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ProtocolShape, "{answer}");
    }
    assert!(
        read_catalog(&json!({"models": [{"value": "default"}]}))
            .unwrap()
            .is_empty()
    );
}

fn takes(model: &str, effort: Effort, catalog: &[CatalogEntry]) -> bool {
    match check_effort(&id(model), Some(effort), catalog) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::EffortUnsupported);
            false
        }
    }
}

#[test]
fn thinking_off_only_where_it_works() {
    let catalog = fallback_catalog(Version::new(2, 1, 332));
    for model in [
        "opus",
        "sonnet[1m]",
        "claude-haiku-5-5",
        "claude-fable-5-1",
        "unknown",
        "default",
    ] {
        assert!(!takes(model, Effort::None, &catalog), "{model}");
    }
    for model in [
        "claude-sonnet-4-5",
        "claude-opus-4-6",
        "claude-opus-4-8",
        "claude-opus-5",
        "claude-sonnet-5",
        "claude-haiku-4-5-20251001",
    ] {
        assert!(takes(model, Effort::None, &catalog), "{model}");
    }
}

#[test]
fn a_level_that_would_be_ignored_is_refused_and_unknown_models_pass() {
    let catalog = fallback_catalog(Version::new(2, 1, 332));
    for level in LEVELS {
        for model in [
            "opus",
            "claude-fable-5-2",
            "haiku",
            "claude-future-7",
            "gpt-x",
        ] {
            assert!(takes(model, level, &catalog), "{model} {level:?}");
        }
        for model in ["claude-sonnet-4-5", "claude-haiku-4-5-20251001"] {
            assert!(!takes(model, level, &catalog), "{model} {level:?}");
        }
        assert_eq!(
            takes("claude-opus-4-6", level, &catalog),
            level != Effort::Xhigh
        );
    }
    check_effort(&id("claude-sonnet-4-5"), None, &catalog).unwrap();
}

#[test]
fn a_refusal_lists_what_works() {
    let error = check_effort(&id("claude-opus-4-6"), Some(Effort::Xhigh), &[]).unwrap_err();
    assert!(
        error
            .detail()
            .ends_with("it takes none, low, medium, high, max"),
        "{error}"
    );
}

proptest! {
    #[test]
    fn no_text_panics_and_only_the_suffix_raises_the_ceiling(text in "(claude-)?(opus|fable|sonnet|x)?[-0-9]{0,12}(\\[1m\\])?") {
        let model = id(&text);
        let ceiling = ceiling_tokens(&model);
        prop_assert!(ceiling == CEILING_TOKENS || text.ends_with(EXTENDED_SUFFIX));
        let _ = (credits(&model), check_effort(&model, Some(Effort::None), &[]));
    }
}

#[test]
fn a_conversation_above_the_ceiling_is_refused_before_anything_is_started() {
    let words = |bytes: usize| [Message::user("x".repeat(bytes))];
    let small = estimate_tokens("", 0, &words(4_000));
    assert_eq!(small, 1_000);
    let large = estimate_tokens("s", 0, &words(4 * 300_000));
    check_context(&"opus".into(), small).unwrap();
    let error = check_context(&"opus".into(), large).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ContextLengthExceeded);
    check_context(&"claude-opus-4-6[1m]".into(), large).unwrap();
}

#[test]
fn an_image_does_not_count_by_its_bytes() {
    let data = "A".repeat(4_000_000);
    let image = Block::Image(crate::conversation::Image {
        source: Source::Base64 {
            media_type: "image/png".into(),
            data,
        },
    });
    let message = Message {
        role: crate::conversation::Role::User,
        content: vec![image],
    };
    assert_eq!(estimate_tokens("", 0, &[message]), 1_600);
}
