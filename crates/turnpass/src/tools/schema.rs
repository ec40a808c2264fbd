//! Input schemas: passed through below the root; the root is made an object.
//!
//! Why: one tool whose schema has no `"type":"object"` at the root empties the CLI's whole list while the server still
//! shows as connected, and a root `anyOf` loses the tool (2.1.283, 2.1.287) or is rewritten by the CLI (2.1.332).
//!
//! Folding loosens and never tightens what the host's schema says of the properties that it names. What a folded root
//! cannot say any more (which properties belong together) is told in the description, in the host's own JSON.

use serde_json::{Map, Value};

/// Longest chain of `$ref`, and deepest nesting of `allOf`, `anyOf` and `oneOf` at the root, that is folded.
const FOLD_DEPTH: usize = 32;

/// Most schemas visited while one root is folded: references may fan out (`a` is `b` and `b`, `b` is `c` and `c`, ...).
const FOLD_STEPS: usize = 10_000;

/// Deepest nesting of a schema. serde_json reads 128 levels, and the catalogue's own file adds a few.
pub const SCHEMA_DEPTH: usize = 100;

/// Longest property name at the root, in bytes, by the service's pattern `^[a-zA-Z0-9_.-]{1,64}$`.
pub const PROPERTY_NAME_BYTES: usize = 64;

/// A schema as it is published.
#[derive(Clone, Debug, PartialEq)]
pub struct Folded {
    /// Has `"type":"object"` at its root, and no `$ref`, `allOf`, `anyOf` or `oneOf` there.
    pub schema: Value,
    /// To be added to the tool's description; empty when nothing was folded away.
    pub told: String,
}

/// Why a schema cannot be published, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SchemaError(String);

type Result<T> = std::result::Result<T, SchemaError>;

fn no<T>(why: impl Into<String>) -> Result<T> {
    Err(SchemaError(why.into()))
}

/// Makes the root an object and checks what the CLI or the service would refuse.
///
/// # Errors
///
/// When no input could satisfy the schema as an object, a reference leads nowhere, a property name is not allowed, or
/// it is nested too deep.
pub fn fold(schema: &Value) -> Result<Folded> {
    if deeper_than(schema, SCHEMA_DEPTH) {
        return no(format!(
            "its schema is nested deeper than {SCHEMA_DEPTH} levels"
        ));
    }
    let folded = match schema {
        Value::Bool(true) => Folded {
            schema: serde_json::json!({"type": "object"}),
            told: String::new(),
        },
        Value::Object(root) => fold_object(root)?,
        Value::Bool(false) => return no("its schema is false, which no input satisfies"),
        _ => return no("its schema is neither an object nor true"),
    };
    check(&folded.schema)?;
    Ok(folded)
}

fn fold_object(root: &Map<String, Value>) -> Result<Folded> {
    let combined = ["$ref", "allOf", "anyOf", "oneOf"]
        .iter()
        .any(|key| root.contains_key(*key));
    if !combined && root.get("type").and_then(Value::as_str) == Some("object") {
        return Ok(Folded {
            schema: Value::Object(root.clone()),
            told: String::new(),
        });
    }
    let mut fold = Fold {
        root,
        told: Vec::new(),
        steps: 0,
    };
    let shape = fold.shape(root, 0)?;
    Ok(Folded {
        told: fold.told.join("\n"),
        schema: assemble(root, shape),
    })
}

/// What one schema says about the input as an object.
#[derive(Clone, Debug, Default)]
struct Shape {
    properties: Map<String, Value>,
    required: Vec<Value>,
}

struct Fold<'a> {
    root: &'a Map<String, Value>,
    told: Vec<String>,
    steps: usize,
}

impl Fold<'_> {
    fn shape(&mut self, schema: &Map<String, Value>, depth: usize) -> Result<Shape> {
        if depth > FOLD_DEPTH {
            return no("its schema refers to itself at the root, or is folded too deep there");
        }
        self.steps += 1;
        if self.steps > FOLD_STEPS {
            return no("its schema's references at the root fan out too far");
        }
        if !may_be_object(schema)? {
            return no("its schema does not allow an object, and tool input is always one");
        }
        let mut shape = own_shape(schema)?;
        if let Some(target) = schema.get("$ref") {
            let target = self.resolve(target)?;
            both(&mut shape, self.shape(&target, depth + 1)?);
        }
        for part in list(schema, "allOf")? {
            self.conjunct(&mut shape, part, depth)?;
        }
        for (key, how) in [("anyOf", "at least one"), ("oneOf", "exactly one")] {
            let variants = list(schema, key)?;
            if !variants.is_empty() {
                self.tell(how, variants);
                let either = self.either(variants, depth)?;
                both(&mut shape, either);
            }
        }
        Ok(shape)
    }

    fn conjunct(&mut self, shape: &mut Shape, part: &Value, depth: usize) -> Result<()> {
        let part = match part {
            Value::Object(part) => part,
            Value::Bool(true) => return Ok(()),
            _ => return no("its schema has an `allOf` part that no input satisfies"),
        };
        both(shape, self.shape(part, depth + 1)?);
        // Whatever is no plain property list cannot be said by a merged root.
        const MERGED: [&str; 11] = [
            "type",
            "properties",
            "required",
            "$ref",
            "allOf",
            "anyOf",
            "oneOf",
            "title",
            "description",
            "$defs",
            "definitions",
        ];
        if part.keys().any(|key| !MERGED.contains(&key.as_str())) {
            self.told.push(format!(
                "The input also has to match this JSON Schema: {}",
                Value::Object(part.clone())
            ));
            for branch in ["then", "else"] {
                if let Some(Value::Object(branch)) = part.get(branch) {
                    let mut branch = self.shape(branch, depth + 1)?;
                    branch.required.clear();
                    branch
                        .properties
                        .retain(|name, _| !shape.properties.contains_key(name));
                    both(shape, branch);
                }
            }
        }
        Ok(())
    }

    /// Variants become optional properties; only what all of them require is required.
    fn either(&mut self, variants: &[Value], depth: usize) -> Result<Shape> {
        let mut merged: Option<Shape> = None;
        for variant in variants {
            let shape = match variant {
                Value::Bool(true) => Shape::default(),
                Value::Object(variant) if may_be_object(variant)? => {
                    self.shape(variant, depth + 1)?
                }
                _ => continue,
            };
            match &mut merged {
                None => merged = Some(shape),
                Some(merged) => {
                    merged.required.retain(|name| shape.required.contains(name));
                    for (name, schema) in shape.properties {
                        unite(&mut merged.properties, name, schema, "anyOf");
                    }
                }
            }
        }
        merged.map_or_else(|| no("none of its schema's variants allows an object"), Ok)
    }

    fn tell(&mut self, how: &str, variants: &[Value]) {
        let mut text = format!("The input has to match {how} of these JSON Schemas:");
        for (n, variant) in variants.iter().enumerate() {
            text += &format!("\n{}. {variant}", n + 1);
        }
        self.told.push(text);
    }

    fn resolve(&self, target: &Value) -> Result<Map<String, Value>> {
        let Some(target) = target.as_str() else {
            return no("its schema has a `$ref` at the root that is not text");
        };
        let shown: String = target.chars().take(80).collect();
        let Some(pointer) = target.strip_prefix('#') else {
            return no(format!(
                "its schema refers to {shown:?}, which is not inside the schema"
            ));
        };
        // The pointer walks from the root by hand: `Value::pointer` needs an owned `Value`.
        let mut parts = pointer.split('/').skip(1).map(unescape);
        let found = match parts.next() {
            None if pointer.is_empty() => return Ok(self.root.clone()),
            None => None,
            Some(first) => parts.fold(self.root.get(&first), |at, part| match at? {
                Value::Object(map) => map.get(&part),
                Value::Array(items) => items.get(part.parse::<usize>().ok()?),
                _ => None,
            }),
        };
        match found {
            Some(Value::Object(found)) => Ok(found.clone()),
            Some(Value::Bool(true)) => Ok(Map::new()),
            _ => no(format!(
                "its schema refers to {shown:?}, which is not there"
            )),
        }
    }
}

/// One part of a JSON pointer in a fragment; percent-encoding is left alone, as schema writers do.
fn unescape(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

fn may_be_object(schema: &Map<String, Value>) -> Result<bool> {
    match schema.get("type") {
        None => Ok(true),
        Some(Value::String(one)) => Ok(one == "object"),
        Some(Value::Array(several)) => Ok(several.iter().any(|one| one == "object")),
        Some(_) => no("its schema has a `type` that is neither text nor a list"),
    }
}

fn own_shape(schema: &Map<String, Value>) -> Result<Shape> {
    let properties = match schema.get("properties") {
        None => Map::new(),
        Some(Value::Object(properties)) => properties.clone(),
        Some(_) => return no("its schema has `properties` that are no object"),
    };
    Ok(Shape {
        properties,
        required: list(schema, "required")?.to_vec(),
    })
}

fn list<'a>(schema: &'a Map<String, Value>, key: &str) -> Result<&'a [Value]> {
    match schema.get(key) {
        None => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(_) => no(format!("its schema has `{key}` that is no list")),
    }
}

/// Adds what has to hold as well.
fn both(shape: &mut Shape, other: Shape) {
    for name in other.required {
        if !shape.required.contains(&name) {
            shape.required.push(name);
        }
    }
    for (name, schema) in other.properties {
        unite(&mut shape.properties, name, schema, "allOf");
    }
}

/// Puts a property in, beside one of the same name if there is one.
fn unite(properties: &mut Map<String, Value>, name: String, schema: Value, word: &str) {
    let Some(have) = properties.get_mut(&name) else {
        properties.insert(name, schema);
        return;
    };
    if *have == schema {
        return;
    }
    if let Some(Value::Array(parts)) = have.as_object_mut().and_then(|map| {
        let only = map.len() == 1;
        map.get_mut(word).filter(|_| only)
    }) {
        if !parts.contains(&schema) {
            parts.push(schema);
        }
        return;
    }
    let first = have.take();
    let mut map = Map::new();
    map.insert(word.to_owned(), Value::Array(vec![first, schema]));
    *have = Value::Object(map);
}

/// `type`, `properties`, `required`, then the root's other keys in their order: the order in which the CLI sends a root
/// on (2.1.294, 2.1.332).
fn assemble(root: &Map<String, Value>, shape: Shape) -> Value {
    const FOLDED: [&str; 7] = [
        "type",
        "properties",
        "required",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
    ];
    let mut out = Map::new();
    out.insert("type".to_owned(), Value::from("object"));
    if !shape.properties.is_empty() || root.contains_key("properties") {
        out.insert("properties".to_owned(), Value::Object(shape.properties));
    }
    if !shape.required.is_empty() || root.contains_key("required") {
        out.insert("required".to_owned(), Value::Array(shape.required));
    }
    for (key, value) in root {
        if !FOLDED.contains(&key.as_str()) {
            out.insert(key.clone(), value.clone());
        }
    }
    Value::Object(out)
}

fn check(schema: &Value) -> Result<()> {
    let properties = match schema.get("properties") {
        None => return Ok(()),
        Some(Value::Object(properties)) => properties,
        Some(_) => return no("its schema has `properties` that are no object"),
    };
    for name in properties.keys() {
        let fits = (1..=PROPERTY_NAME_BYTES).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
        if !fits {
            let shown: String = name.chars().take(80).collect();
            return no(format!(
                "its property {shown:?} is not one to {PROPERTY_NAME_BYTES} letters, digits, `_`, `.` or `-`"
            ));
        }
    }
    if schema.get("required").is_some_and(|r| !r.is_array()) {
        return no("its schema has `required` that is no list");
    }
    Ok(())
}

/// Without recursion, so that a schema built by a program cannot exhaust the stack here. (Dropping it is the host's.)
fn deeper_than(value: &Value, limit: usize) -> bool {
    let mut rest = vec![(value, 1)];
    while let Some((value, depth)) = rest.pop() {
        if depth > limit {
            return true;
        }
        match value {
            Value::Array(items) => rest.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(map) => rest.extend(map.values().map(|item| (item, depth + 1))),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn folded(schema: Value) -> Folded {
        fold(&schema).unwrap()
    }

    fn refused(schema: Value) -> String {
        fold(&schema).unwrap_err().to_string()
    }

    #[test]
    fn bug_066_an_object_schema_passes_byte_for_byte() {
        let text = r##"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object","properties":{"z":{"type":"array","items":{"type":"object","properties":{"k":{"const":1},"e":{"enum":[1,2.5,null],"description":"é\n"}},"additionalProperties":false}},"a":{"anyOf":[{"$ref":"#/definitions/d"},{"type":"null"}]},"s":{"type":"string","pattern":"^a.*$","format":"date","minLength":1}},"required":["z"],"definitions":{"d":{"type":"object","properties":{"self":{"$ref":"#/definitions/d"}}}},"additionalProperties":true,"not":{"required":["q"]}}"##;
        let schema: Value = serde_json::from_str(text).unwrap();
        let out = folded(schema);
        assert_eq!(out.schema.to_string(), text);
        assert_eq!(out.told, "");
    }

    #[test]
    fn bug_065_roots_without_a_plain_object_type() {
        let object = json!({"type": "object"});
        for (schema, wanted) in [
            (json!(true), object.clone()),
            (json!({}), object.clone()),
            (json!({"type": ["object", "null"]}), object.clone()),
            (
                json!({"properties": {"a": {}}, "required": ["a"], "x": 1}),
                json!({"type": "object", "properties": {"a": {}}, "required": ["a"], "x": 1}),
            ),
        ] {
            let out = folded(schema);
            assert_eq!(out.schema.to_string(), wanted.to_string());
            assert_eq!(out.told, "");
        }
    }

    #[test]
    fn bug_065_one_of_objects_is_folded_and_told() {
        let a = json!({"type":"object","properties":{"kind":{"const":"a"},"n":{"type":"number"}},"required":["kind","n"]});
        let b = json!({"type":"object","properties":{"kind":{"const":"b"}},"required":["kind"]});
        let c = json!({"type":"object","properties":{"kind":{"const":"c"}},"required":["kind"]});
        let out = folded(json!({"oneOf": [a, b, c, {"type": "null"}], "title": "T"}));
        assert_eq!(
            out.schema,
            json!({
                "type": "object", "title": "T",
                "properties": {
                    "kind": {"anyOf": [{"const": "a"}, {"const": "b"}, {"const": "c"}]},
                    "n": {"type": "number"},
                },
                "required": ["kind"],
            })
        );
        assert!(
            out.told
                .starts_with("The input has to match exactly one of")
        );
        for variant in [a, b, c] {
            assert!(out.told.contains(&variant.to_string()), "{}", out.told);
        }
    }

    #[test]
    fn bug_065_all_of_with_a_condition() {
        let condition = json!({"if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": {"type": "string"}}, "required": ["b"]}});
        let out = folded(json!({
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "allOf": [{"properties": {"c": {}}, "required": ["c"]}, condition.clone()],
        }));
        assert_eq!(
            out.schema,
            json!({
                "type": "object",
                "properties": {"a": {"type": "integer"}, "c": {}, "b": {"type": "string"}},
                "required": ["c"],
            })
        );
        assert!(out.told.contains(&condition.to_string()));
    }

    #[test]
    fn bug_065_a_reference_at_the_root_is_put_in() {
        for defs in ["$defs", "definitions"] {
            let node = json!({"type": "object", "properties": {"next": {"$ref": format!("#/{defs}/a~1b")}}, "required": ["next"]});
            let out = folded(json!({"$ref": format!("#/{defs}/a~1b"), defs: {"a/b": node}}));
            assert_eq!(
                out.schema,
                json!({
                    "type": "object",
                    defs: {"a/b": node},
                    "properties": node["properties"],
                    "required": ["next"],
                })
            );
            assert_eq!(out.told, "");
        }
    }

    #[test]
    fn bug_065_a_variant_of_references() {
        let out = folded(json!({
            "anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
            "$defs": {
                "x": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]},
                "y": {"properties": {"p": {"type": "number"}}, "required": ["p"]},
            },
        }));
        assert_eq!(
            out.schema["properties"],
            json!({"p": {"anyOf": [{"type": "string"}, {"type": "number"}]}})
        );
        assert_eq!(out.schema["required"], json!(["p"]));
        assert!(out.told.contains("#/$defs/y"));
    }

    #[test]
    fn what_no_object_satisfies_is_refused_with_its_reason() {
        for (schema, part) in [
            (json!(false), "false"),
            (json!("x"), "neither"),
            (json!({"type": "string"}), "does not allow an object"),
            (json!({"type": 5}), "`type`"),
            (json!({"anyOf": [{"type": "string"}, false]}), "variants"),
            (json!({"allOf": [false]}), "`allOf`"),
            (json!({"anyOf": 1}), "`anyOf`"),
            (json!({"$ref": "#"}), "refers to itself"),
            (json!({"$ref": "#/$defs/no"}), "not there"),
            (json!({"$ref": "https://e.x/s"}), "not inside"),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
                "refers to itself",
            ),
            (json!({"type": "object", "properties": []}), "`properties`"),
            (
                json!({"type": "object", "properties": {}, "required": 1}),
                "`required`",
            ),
            (
                json!({"type": "object", "properties": {"a b": {}}}),
                "\"a b\"",
            ),
            (json!({"type": "object", "properties": {"": {}}}), "\"\""),
            (
                json!({"anyOf": [{"properties": {"filter[id]": {}}}]}),
                "filter[id]",
            ),
        ] {
            let said = refused(schema.clone());
            assert!(said.contains(part), "{schema}: {said}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let mut schema = json!({"type": "string"});
        for _ in 0..200 {
            schema = json!({"type": "object", "properties": {"a": schema}});
        }
        assert!(refused(schema).contains("nested deeper"));
        let mut ladder = json!({});
        for _ in 0..60 {
            ladder = json!({"allOf": [ladder]});
        }
        assert!(fold(&ladder).is_err());
        let mut defs = Map::new();
        for n in 0..15 {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            defs.insert(format!("d{n}"), json!({"allOf": [next, next]}));
        }
        defs.insert("d15".into(), json!({}));
        let fan = json!({"$ref": "#/$defs/d0", "$defs": defs});
        assert!(refused(fan).contains("fan out"));
    }

    #[test]
    fn bug_065_a_big_schema_passes() {
        let properties: Map<String, Value> = (0..2000)
            .map(|n| {
                (
                    format!("p{n}"),
                    json!({"type": "string", "description": "d".repeat(80)}),
                )
            })
            .collect();
        let schema =
            json!({"type": "object", "properties": properties, "additionalProperties": true});
        assert!(schema.to_string().len() > 200_000);
        assert_eq!(folded(schema.clone()).schema, schema);
    }
}
