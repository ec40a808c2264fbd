//! The tools of one request, checked and in the forms that the carriers need.

use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::mcp::{self, Policy};
use super::schema;
use crate::conversation::digest::Digest;
use crate::conversation::names::{self, Names, PREFIX, Resolved, SERVER, shown};
use crate::error::{Error, ErrorCode, Result};
use crate::request::Tool;

/// What `_meta["anthropic/maxResultSizeChars"]` says, in characters: without it the CLI swaps a result above 50,000
/// characters for a note about a file (2.1.332).
pub const RESULT_CHARS: usize = 500_000;

/// How many tools, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogueLimits {
    /// Most tools.
    pub tools: usize,
    /// Most bytes of the `tools/list` result.
    pub bytes: usize,
}

impl CatalogueLimits {
    /// Pool and relay. 300 tools in a body of 540 KB were all sent by the CLI (2.1.332); the rest is head-room. A context
    /// window is full long before.
    pub const LIVE: Self = Self {
        tools: 1024,
        bytes: 2 * 1024 * 1024,
    };

    /// Replay: every request reads the catalogue anew.
    pub const REPLAY: Self = Self {
        tools: 256,
        bytes: 2 * 1024 * 1024,
    };
}

/// One tool as it is published.
#[derive(Clone, Debug)]
pub struct Published {
    /// The host's name.
    pub host: String,
    /// The name in MCP, without the CLI's prefix.
    pub alias: String,
    /// The name that the model sees.
    pub name: String,
}

/// The tools of one request.
///
/// Two catalogues of the same tools, in whatever order, are the same bytes and have the same digest.
#[derive(Clone, Debug)]
pub struct Catalogue {
    tools: Vec<Published>,
    names: Names,
    list: Box<RawValue>,
    request: Box<RawValue>,
    /// Made when it is asked for: tools that travel in the body need none.
    digest: OnceLock<Digest>,
}

/// A tool as it stands in a Messages request.
#[derive(Serialize)]
struct Requested<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: &'a serde_json::Value,
}

#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    description: &'a str,
    #[serde(rename = "inputSchema")]
    input_schema: &'a serde_json::Value,
    annotations: Annotations,
    #[serde(rename = "_meta")]
    meta: Meta,
}

/// With the hint, the CLI issues all calls of a message at once (2.1.332); without it, one after the other.
#[derive(Serialize)]
struct Annotations {
    #[serde(rename = "readOnlyHint")]
    read_only_hint: bool,
}

#[derive(Serialize)]
struct Meta {
    #[serde(rename = "anthropic/maxResultSizeChars")]
    max_result_size_chars: usize,
    #[serde(rename = "anthropic/alwaysLoad")]
    always_load: bool,
}

impl Catalogue {
    /// The catalogue of these tools, within [`CatalogueLimits::LIVE`].
    ///
    /// # Errors
    ///
    /// See [`Catalogue::build_within`].
    pub fn build(tools: &[Tool]) -> Result<Self> {
        Self::build_within(tools, CatalogueLimits::LIVE)
    }

    /// The catalogue of these tools.
    ///
    /// # Errors
    ///
    /// `tool_invalid` when a tool cannot be published or is offered twice, `tool_limit` for too many,
    /// `tool_catalog_size` for too large ones. Nothing is ever left out without a word.
    pub fn build_within(tools: &[Tool], limits: CatalogueLimits) -> Result<Self> {
        if tools.len() > limits.tools {
            return Err(Error::new(
                ErrorCode::ToolLimit,
                format!(
                    "the request offers {} tools, at most {} are allowed",
                    tools.len(),
                    limits.tools
                ),
            ));
        }
        let names = Names::new(tools.iter().map(|tool| tool.name.as_str()))?;
        let mut entries = tools
            .iter()
            .map(|tool| Ok((published(&tool.name)?, tool)))
            .collect::<Result<Vec<_>>>()?;
        entries.sort_by_cached_key(|(entry, _)| sort_key(&entry.name));
        let (list, request) = lists_json(&entries, limits.bytes)?;
        Ok(Self {
            digest: OnceLock::new(),
            tools: entries.into_iter().map(|(entry, _)| entry).collect(),
            names,
            list,
            request,
        })
    }

    /// The published tools in their order.
    pub fn tools(&self) -> &[Published] {
        &self.tools
    }

    /// The host's names of the tools whose description has more characters than this. Reads the whole list.
    pub fn long_descriptions(&self, chars: usize) -> impl Iterator<Item = &str> {
        #[derive(serde::Deserialize)]
        struct Described<'a> {
            #[serde(borrow)]
            description: std::borrow::Cow<'a, str>,
        }
        // It was written here, in the order of the tools.
        let listed: Vec<Described<'_>> =
            serde_json::from_str(self.request.get()).unwrap_or_default();
        let long = move |one: &Described<'_>| one.description.chars().count() > chars;
        let both = self.tools.iter().zip(listed);
        both.filter(move |(_, one)| long(one))
            .map(|(tool, _)| tool.host.as_str())
    }

    /// Whether there are none; no server is needed then.
    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    /// Stands for names, descriptions, schemas and order: part of the key of a process.
    pub fn digest(&self) -> Digest {
        *self
            .digest
            .get_or_init(|| Digest::of(self.list.get().as_bytes()))
    }

    /// The way back from names on the wire.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// What a name that the model wrote stands for.
    pub fn resolve(&self, written: &str) -> Resolved<'_> {
        self.names.resolve(written)
    }

    /// The names that the CLI has to list, in the order in which it lists them.
    pub fn expected_tool_names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().map(|tool| tool.name.as_str())
    }

    /// The result of `tools/list`: `{"tools":[...]}`.
    pub fn tools_list_json(&self) -> &RawValue {
        &self.list
    }

    /// The value of `tools` in a Messages request: a JSON array.
    pub fn request_json(&self) -> &RawValue {
        &self.request
    }

    /// The value of `sdkMcpServerManifests.turnpass` in the CLI's `initialize`: with it no MCP message is exchanged before
    /// the first call (2.1.332).
    pub fn manifest(&self) -> Box<RawValue> {
        let text = format!(
            r#"{{"initializeResult":{},"toolsListResult":{}}}"#,
            mcp::initialize_result(mcp::NEWEST_PROTOCOL),
            self.list.get()
        );
        raw(text)
    }

    /// The content of the file that `turnpass mcp-stdio` serves.
    pub fn file_json(&self) -> String {
        format!(
            r#"{{"format":{FILE_FORMAT},"digest":"{}","list":{}}}"#,
            self.digest(),
            self.list.get()
        )
    }
}

/// The version of the catalogue file. The reader is the same program, but may have been updated in between.
const FILE_FORMAT: u32 = 1;

/// What `turnpass mcp-stdio` needs of a catalogue.
#[derive(Debug)]
pub struct CatalogueFile {
    /// The result of `tools/list`.
    pub list: Box<RawValue>,
}

impl CatalogueFile {
    /// Reads what [`Catalogue::file_json`] wrote.
    ///
    /// # Errors
    ///
    /// `mcp_startup` when the file is cut, changed, or from another version of turnpass.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct File {
            format: u32,
            digest: Digest,
            list: Box<RawValue>,
        }
        let bad = |why: String| Error::new(ErrorCode::McpStartup, why);
        let file: File = serde_json::from_slice(bytes)
            .map_err(|error| bad(format!("the catalogue file cannot be read: {error}")))?;
        if file.format != FILE_FORMAT {
            return Err(bad(format!(
                "the catalogue file has format {}, this program reads {FILE_FORMAT}",
                file.format
            )));
        }
        if Digest::of(file.list.get().as_bytes()) != file.digest {
            return Err(bad("the catalogue file was changed".to_owned()));
        }
        Ok(Self { list: file.list })
    }
}

/// How the CLI is to start `turnpass mcp-stdio`.
#[derive(Clone, Copy, Debug)]
pub struct StdioCommand<'a> {
    /// The turnpass program, absolute.
    pub program: &'a Path,
    /// The file with [`Catalogue::file_json`].
    pub catalogue: &'a Path,
    /// Inert or proposing; answering needs a carrier to the host.
    pub policy: Policy,
    /// Made when the CLI has the list.
    pub ready: Option<&'a Path>,
    /// Made when the CLI calls a tool.
    pub violation: Option<&'a Path>,
}

/// The content of the file for `--mcp-config`.
///
/// # Errors
///
/// `launch_failed` when a path is not UTF-8: it could not be written as JSON.
pub fn mcp_config_stdio(command: &StdioCommand<'_>) -> Result<String> {
    let mut args = vec!["mcp-stdio", "--catalogue", text_of(command.catalogue)?];
    args.extend(["--policy", command.policy.as_str()]);
    for (option, path) in [
        ("--ready", command.ready),
        ("--violation", command.violation),
    ] {
        if let Some(path) = path {
            args.extend([option, text_of(path)?]);
        }
    }
    let config = serde_json::json!({"mcpServers": {SERVER: {
        "type": "stdio",
        "command": text_of(command.program)?,
        "args": args,
        "env": {},
        "alwaysLoad": true,
    }}});
    Ok(config.to_string())
}

fn text_of(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::new(
            ErrorCode::LaunchFailed,
            format!("the path {} is not UTF-8", path.display()),
        )
    })
}

fn published(host: &str) -> Result<Published> {
    let alias = names::alias(host)?.into_owned();
    Ok(Published {
        host: host.to_owned(),
        name: format!("{PREFIX}{alias}"),
        alias,
    })
}

/// The order in which the CLI lists tools in `init` and upstream (2.1.294, 2.1.332): `_`, `-`, digits, letters without
/// regard to case; names that differ in case only with the small letter first.
fn sort_key(name: &str) -> (Vec<u8>, Vec<bool>) {
    let primary = name.bytes().map(|byte| match byte {
        b'_' => 0,
        b'-' => 1,
        byte => byte.to_ascii_lowercase(),
    });
    let capital = name.bytes().map(|byte| byte.is_ascii_uppercase());
    (primary.collect(), capital.collect())
}

const LIST_END: &str = "]}";

/// The result of `tools/list`, and the `tools` of a Messages request.
fn lists_json(
    entries: &[(Published, &Tool)],
    limit: usize,
) -> Result<(Box<RawValue>, Box<RawValue>)> {
    let (mut list, mut request) = (String::from(r#"{"tools":["#), String::from("["));
    for (n, (entry, tool)) in entries.iter().enumerate() {
        if n > 0 {
            list.push(',');
            request.push(',');
        }
        let (listed, requested) = tool_json(entry, tool)?;
        list += &listed;
        request += &requested;
        if list.len() + LIST_END.len() > limit {
            return Err(Error::new(
                ErrorCode::ToolCatalogSize,
                format!(
                    "the tools are more than {limit} bytes as JSON; the limit was passed at {:?}",
                    shown(&tool.name)
                ),
            ));
        }
    }
    list += LIST_END;
    request.push(']');
    Ok((raw(list), raw(request)))
}

fn tool_json(entry: &Published, tool: &Tool) -> Result<(String, String)> {
    let invalid = |why: String| {
        Error::new(
            ErrorCode::ToolInvalid,
            format!("the tool {:?}: {why}", shown(&tool.name)),
        )
    };
    let folded = schema::fold(&tool.input_schema).map_err(|error| invalid(error.to_string()))?;
    let description = if folded.told.is_empty() {
        tool.description.clone()
    } else if tool.description.is_empty() {
        folded.told
    } else {
        format!("{}\n\n{}", tool.description, folded.told)
    };
    let listed = Listed {
        name: &entry.alias,
        description: &description,
        input_schema: &folded.schema,
        annotations: Annotations {
            read_only_hint: true,
        },
        meta: Meta {
            max_result_size_chars: RESULT_CHARS,
            always_load: true,
        },
    };
    let requested = Requested {
        name: &entry.name,
        description: &description,
        input_schema: &folded.schema,
    };
    let json = |text: serde_json::Result<String>| text.map_err(|error| invalid(error.to_string()));
    Ok((
        json(serde_json::to_string(&listed))?,
        json(serde_json::to_string(&requested))?,
    ))
}

fn raw(text: String) -> Box<RawValue> {
    debug_assert!(serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok());
    #[allow(
        clippy::expect_used,
        reason = "the text was put together from serialised JSON, and a test parses what comes out"
    )]
    RawValue::from_string(text).expect("valid JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn tool(name: &str) -> Tool {
        Tool {
            name: name.into(),
            description: format!("does {name}"),
            input_schema: json!({"type": "object", "properties": {"z": {}, "a": {}}}),
        }
    }

    fn value(raw: &RawValue) -> Value {
        serde_json::from_str(raw.get()).unwrap()
    }

    #[test]
    fn bug_074_the_smallest_form() {
        let catalogue = Catalogue::build(&[tool("read")]).unwrap();
        assert_eq!(
            catalogue.tools_list_json().get(),
            r#"{"tools":[{"name":"read","description":"does read","inputSchema":{"type":"object","properties":{"z":{},"a":{}}},"annotations":{"readOnlyHint":true},"_meta":{"anthropic/maxResultSizeChars":500000,"anthropic/alwaysLoad":true}}]}"#
        );
        assert_eq!(
            value(&catalogue.manifest()),
            json!({
                "initializeResult": {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "turnpass", "version": env!("CARGO_PKG_VERSION")},
                },
                "toolsListResult": value(catalogue.tools_list_json()),
            })
        );
    }

    #[test]
    fn bug_049_names_that_reach_upstream_have_the_server_s_form() {
        let catalogue = Catalogue::build(&[tool("mcp_probe")]).unwrap();
        assert_eq!(
            catalogue.request_json().get(),
            r#"[{"name":"mcp__turnpass__mcp_probe","description":"does mcp_probe","input_schema":{"type":"object","properties":{"z":{},"a":{}}}}]"#
        );
    }

    #[test]
    fn bug_058_the_order_of_the_host_does_not_matter() {
        let mut tools: Vec<_> = [
            "zeta", "Alpha", "alpha", "b.c", "beta", "Zed", "a1", "a-b", "ab", "a_b",
        ]
        .map(tool)
        .into();
        let one = Catalogue::build(&tools).unwrap();
        tools.reverse();
        let two = Catalogue::build(&tools).unwrap();
        assert_eq!(one.tools_list_json().get(), two.tools_list_json().get());
        assert_eq!(one.digest(), two.digest());
        let order: Vec<_> = one.tools().iter().map(|tool| tool.host.as_str()).collect();
        // As CLI 2.1.294 and 2.1.332 sent them.
        let sent = [
            "a_b", "a-b", "a1", "ab", "alpha", "Alpha", "b.c", "beta", "Zed", "zeta",
        ];
        assert_eq!(order, sent);
        tools[0].description.push('!');
        assert_ne!(Catalogue::build(&tools).unwrap().digest(), one.digest());
    }

    #[test]
    fn bug_064_every_tool_of_many_is_there() {
        let tools: Vec<_> = (0..300).map(|n| tool(&format!("t{n}"))).collect();
        let catalogue = Catalogue::build(&tools).unwrap();
        let listed = value(catalogue.tools_list_json());
        assert_eq!(listed["tools"].as_array().unwrap().len(), 300);
        assert_eq!(catalogue.expected_tool_names().count(), 300);
        assert!(
            catalogue
                .expected_tool_names()
                .all(|name| catalogue.resolve(name).host().is_some())
        );
    }

    #[test]
    fn bug_065_variants_are_told_after_the_hosts_own_words() {
        let mut one = tool("one");
        one.input_schema = json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]});
        let listed = value(Catalogue::build(&[one]).unwrap().tools_list_json());
        let description = listed["tools"][0]["description"].as_str().unwrap();
        assert!(description.starts_with("does one\n\nThe input has to match exactly one"));
        assert_eq!(listed["tools"][0]["inputSchema"], json!({"type": "object"}));
    }

    #[test]
    fn a_tool_that_cannot_be_published_is_named() {
        for (schema, part) in [
            (json!({"type": "array"}), "does not allow an object"),
            (
                json!({"type": "object", "properties": {"a b": {}}}),
                "\"a b\"",
            ),
            (json!(false), "no input satisfies"),
        ] {
            let mut bad = tool("bad one");
            bad.input_schema = schema;
            let error = Catalogue::build(&[tool("good"), bad]).unwrap_err();
            assert_eq!(error.code(), ErrorCode::ToolInvalid);
            assert!(error.detail().contains("\"bad one\""), "{error}");
            assert!(error.detail().contains(part), "{error}");
        }
        let error = Catalogue::build(&[tool("same"), tool("same")]).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ToolInvalid);
    }

    #[test]
    fn limits_are_typed_and_exact() {
        let tools: Vec<_> = (0..=256).map(|n| tool(&format!("t{n}"))).collect();
        let replay = |tools| Catalogue::build_within(tools, CatalogueLimits::REPLAY);
        assert!(replay(&tools[..256]).is_ok());
        assert_eq!(replay(&tools).unwrap_err().code(), ErrorCode::ToolLimit);
        let bytes = Catalogue::build(&tools[..1]).unwrap().list.get().len();
        let within =
            |bytes| Catalogue::build_within(&tools[..1], CatalogueLimits { tools: 1, bytes });
        assert!(within(bytes).is_ok());
        let error = within(bytes - 1).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ToolCatalogSize);
        assert!(error.detail().contains("\"t0\""));
    }

    #[test]
    fn long_descriptions_are_named_by_the_host_s_names() {
        let mut tools = vec![tool("b"), tool("a"), tool("c")];
        tools[0].description = "é".repeat(21);
        tools[1].description = "\"é\n".repeat(7);
        tools[2].description = "x".repeat(20);
        let catalogue = Catalogue::build(&tools).unwrap();
        let long: Vec<_> = catalogue.long_descriptions(20).collect();
        assert_eq!(long, ["a", "b"]);
    }

    #[test]
    fn descriptions_are_not_cut() {
        let mut long = tool("long");
        long.description = "é".repeat(100_000);
        let listed = value(Catalogue::build(&[long.clone()]).unwrap().tools_list_json());
        assert_eq!(listed["tools"][0]["description"], long.description);
    }

    #[test]
    fn the_file_comes_back_and_a_changed_one_does_not() {
        let catalogue = Catalogue::build(&[tool("a"), tool("b")]).unwrap();
        let text = catalogue.file_json();
        let read = CatalogueFile::read(text.as_bytes()).unwrap();
        assert_eq!(read.list.get(), catalogue.tools_list_json().get());
        for bad in [
            &text[..text.len() - 1],
            &text.replace("does a", "does c"),
            &text.replace(r#""format":1"#, r#""format":2"#),
            "",
        ] {
            let error = CatalogueFile::read(bad.as_bytes()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::McpStartup);
        }
    }

    #[test]
    fn the_config_of_the_stdio_server() {
        let config = mcp_config_stdio(&StdioCommand {
            program: Path::new("/bin/turn \"pass"),
            catalogue: Path::new("/run/c.json"),
            policy: Policy::Proposing,
            ready: Some(Path::new("/run/ready")),
            violation: Some(Path::new("/run/violation")),
        })
        .unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(&config).unwrap(),
            json!({"mcpServers": {"turnpass": {
                "type": "stdio", "command": "/bin/turn \"pass",
                "args": ["mcp-stdio", "--catalogue", "/run/c.json", "--policy", "proposing",
                         "--ready", "/run/ready", "--violation", "/run/violation"],
                "env": {}, "alwaysLoad": true,
            }}})
        );
    }
}
