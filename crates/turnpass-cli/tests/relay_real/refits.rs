//! Everything about a request changes from one generation to the next: the service gets exactly what was asked for.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use turnpass::ErrorCode;
use turnpass::relay::ToolCarrier;
use turnpass::request::{Effort, Request, Sampling, ThinkingDisplay, Tool, ToolChoice};

use crate::bench::{Bench, Random, Setup, body, say, tool};

/// Generations: kept processes, and where each one starts a process (per request, or for its tools).
const GENERATIONS: (usize, usize) = (30, 6);

/// The models that are asked for: as asked, at the service, default effort.
const MODELS: [(&str, &str, &str); 4] = [
    ("sonnet", "claude-sonnet-5-5", "medium"),
    ("opus", "claude-opus-5-5", "medium"),
    ("haiku", "claude-haiku-5-5", "medium"),
    ("claude-opus-4-6", "claude-opus-4-6", "high"),
];

/// Model, effort, prompt, tools and sampling, in random order, each as wanted at the service (bugs 79, 113).
pub(crate) async fn everything(setup: Setup) {
    let bench = Bench::new(&setup);
    let mut random = Random::new(11);
    let starts_each = !setup.is_warm() || setup.tools == ToolCarrier::Mcp;
    let generations = if starts_each {
        GENERATIONS.1
    } else {
        GENERATIONS.0
    };
    for number in 0..generations {
        let (wanted, model, default_effort) = draw(&mut random);
        let (answer, seen) = bench.ask(wanted.clone()).await;
        answer.done();
        let [recorded] = &seen[..] else {
            panic!("{} requests", seen.len())
        };
        let problem = compare(&wanted, model, default_effort, body(recorded));
        assert_eq!(
            problem,
            None,
            "generation {number}: {wanted:?}\n{}",
            body(recorded)
        );
    }
    assert_eq!(bench.count(), generations);
    if !starts_each {
        // With and without a prompt: a live process takes no empty one.
        assert!(bench.spawned().len() <= 2, "{:?}", bench.spawned());
    }
    bench.finish().await;
}

fn draw(random: &mut Random) -> (Request, &'static str, &'static str) {
    let (asked, model, default_effort) = MODELS[random.below(MODELS.len())];
    let mut request = say("[[say ok]]");
    request.model = asked.into();
    let efforts = [
        None,
        Some(Effort::Low),
        Some(Effort::Medium),
        Some(Effort::High),
        Some(Effort::Max),
    ];
    request.effort = efforts[random.below(efforts.len())];
    if asked == "claude-opus-4-6" && random.below(3) == 0 {
        request.effort = Some(Effort::None);
    }
    request.system = match random.below(4) {
        0 => String::new(),
        1 => "A short one.".to_owned(),
        2 => format!(
            "Zeilen\r\n\tund „Zeichen“ 👩‍👩‍👧 @/etc/hostname /clear {}",
            random.word()
        ),
        _ => random.word().repeat(4_000),
    };
    request.tools = (0..random.below(6))
        .map(|at| drawn_tool(random, at))
        .collect();
    let by = random.below(request.tools.len().max(1));
    request.tools.rotate_left(by);
    request.sampling = sampling(random, &request.tools);
    (request, model, default_effort)
}

/// One name of a few, each time with another description and schema.
fn drawn_tool(random: &mut Random, at: usize) -> Tool {
    Tool {
        description: format!(
            "{} {}",
            random.word(),
            "long ".repeat(random.below(2) * 900)
        ),
        input_schema: json!({
            "type": "object",
            "properties": {random.word(): {"type": "string", "enum": ["a", random.word()]}},
        }),
        ..tool(&format!("tool_{at}"))
    }
}

fn sampling(random: &mut Random, tools: &[Tool]) -> Sampling {
    let mut wants = || random.below(3) == 0;
    let mut sampling = Sampling {
        max_tokens: wants().then_some(1_234),
        stop_sequences: if wants() {
            vec!["END".into(), "\u{1F469}\n".into()]
        } else {
            Vec::new()
        },
        temperature: wants().then_some(1.0),
        top_p: wants().then_some(0.75),
        top_k: wants().then_some(5),
        tool_choice: None,
        output_schema: wants()
            .then(|| json!({"type": "object", "properties": {"x": {"type": "integer"}}})),
    };
    if let Some(first) = tools.first() {
        sampling.tool_choice = match random.below(6) {
            0 => Some(ToolChoice::Any {
                disable_parallel_tool_use: true,
            }),
            1 => Some(ToolChoice::None),
            2 => Some(ToolChoice::Tool {
                name: first.name.clone(),
                disable_parallel_tool_use: false,
            }),
            3 => Some(ToolChoice::Auto {
                disable_parallel_tool_use: true,
            }),
            _ => None,
        };
    }
    sampling
}

/// What differs between a request and the body that the service got.
fn compare(
    wanted: &Request,
    model: &str,
    default_effort: &'static str,
    body: &Value,
) -> Option<String> {
    let mut wrong = Vec::new();
    let mut same = |what: &str, found: &Value, wanted: Value| {
        if *found != wanted {
            wrong.push(format!("{what}: {found} instead of {wanted}"));
        }
    };
    same("model", &body["model"], model.into());
    let system: Vec<&Value> = body["system"].as_array()?.iter().skip(2).collect();
    match &wanted.system[..] {
        "" => same("system", &json!(system), json!([])),
        prompt => same(
            "system",
            &json!([system.len(), system[0]["text"]]),
            json!([1, prompt]),
        ),
    }
    let effort = &body["output_config"]["effort"];
    match wanted.effort {
        Some(Effort::None) => same("thinking", &body["thinking"], json!({"type": "disabled"})),
        level => {
            same(
                "effort",
                effort,
                level.map_or(default_effort, Effort::as_str).into(),
            );
            same(
                "thinking",
                &body["thinking"],
                json!({"type": "adaptive", "display": "summarized"}),
            );
        }
    }
    let found: BTreeMap<&str, Value> = body["tools"]
        .as_array()?
        .iter()
        .map(|tool| {
            (
                tool["name"].as_str().unwrap(),
                json!([tool["description"], tool["input_schema"]]),
            )
        })
        .collect();
    let published = |name: &str| format!("mcp__turnpass__{name}");
    let tools: BTreeMap<String, Value> = wanted
        .tools
        .iter()
        .map(|tool| {
            (
                published(&tool.name),
                json!([tool.description, tool.input_schema]),
            )
        })
        .collect();
    same("tools", &json!(found), json!(tools));
    let sampling = &wanted.sampling;
    let choice = sampling.tool_choice.as_ref().map(|choice| match choice {
        ToolChoice::Auto { .. } => json!({"type": "auto", "disable_parallel_tool_use": true}),
        ToolChoice::Any { .. } => json!({"type": "any", "disable_parallel_tool_use": true}),
        ToolChoice::Tool { name, .. } => json!({"type": "tool", "name": published(name)}),
        ToolChoice::None => json!({"type": "none"}),
    });
    let format = sampling.output_schema.as_ref();
    let format = format.map(|schema| json!({"type": "json_schema", "schema": schema}));
    same("tool_choice", &body["tool_choice"], json!(choice));
    same(
        "output_config.format",
        &body["output_config"]["format"],
        json!(format),
    );
    let stops = (!sampling.stop_sequences.is_empty()).then_some(&sampling.stop_sequences);
    same("stop_sequences", &body["stop_sequences"], json!(stops));
    let number = |value: &Value| json!(value.as_f64());
    same(
        "temperature",
        &number(&body["temperature"]),
        json!(sampling.temperature),
    );
    same("top_p", &number(&body["top_p"]), json!(sampling.top_p));
    same("top_k", &body["top_k"], json!(sampling.top_k));
    same(
        "max_tokens",
        &json!(body["max_tokens"] == 1_234),
        json!(sampling.max_tokens.is_some()),
    );
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

/// A setting that the model or the relay cannot honour is refused by name, before anything is sent (bug 113).
pub(crate) async fn refused_settings(setup: Setup) {
    let bench = Bench::new(&setup);
    let mut no_thinking_off = say("x");
    no_thinking_off.effort = Some(Effort::None);
    let mut no_tool = say("x");
    no_tool.sampling.tool_choice = Some(ToolChoice::Tool {
        name: "gone".into(),
        disable_parallel_tool_use: false,
    });
    let mut no_tools = say("x");
    no_tools.tools.clear();
    no_tools.sampling.tool_choice = Some(ToolChoice::Any {
        disable_parallel_tool_use: false,
    });
    let mut no_tokens = say("x");
    no_tokens.sampling.max_tokens = Some(0);
    let mut nul = say("x");
    nul.model = "son\0net".into();
    let mut option = say("x");
    option.model = "--dangerously-skip-permissions".into();
    let cases = [
        (no_thinking_off, ErrorCode::EffortUnsupported, "effort none"),
        (no_tool, ErrorCode::RequestInvalid, "gone"),
        (no_tools, ErrorCode::RequestInvalid, "tool_choice"),
        (no_tokens, ErrorCode::RequestInvalid, "max_tokens"),
        (nul, ErrorCode::RequestInvalid, "model"),
        (option, ErrorCode::RequestInvalid, "model"),
    ];
    for (request, code, named) in cases {
        let (answer, seen) = bench.ask(request).await;
        let error = answer.error();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.detail().contains(named), "{error}");
        assert!(seen.is_empty());
    }
    assert!(bench.spawned().is_empty());

    // The display of thinking is part of the launch: both kinds side by side.
    for (display, at_service) in [
        (ThinkingDisplay::Omitted, "updates"),
        (ThinkingDisplay::Summarized, "summarized"),
    ] {
        let mut request = say("[[say ok]]");
        request.thinking = display;
        let (answer, seen) = bench.ask(request).await;
        answer.done();
        assert_eq!(body(&seen[0])["thinking"]["display"], at_service);
    }
    bench.finish().await;
}
