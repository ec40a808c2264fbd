//! A simulation of the API's prompt cache: pure but for the clock that is handed in.
//!
//! A request is a sequence of blocks: each tool, each system block, each content block of each message, in this order. A
//! block with `cache_control` is a breakpoint. From each breakpoint the simulation looks back over at most
//! [`LOOK_BACK_BLOCKS`] blocks for a prefix that is in the cache and alive; the longest one is read, and the prefixes of the
//! breakpoints after it are written with their time to live. A request's own `cache_control` marks its last block.
//!
//! Tokens are an estimate on purpose: a block is its JSON without `cache_control`, [`tokens`] of its bytes; a base64
//! image or document counts [`MEDIA_TOKENS`].

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

/// How many blocks, the breakpoint included, are looked at for a cached prefix (as the API documents it).
pub const LOOK_BACK_BLOCKS: usize = 20;

/// What a base64 image or document counts, whatever its size.
pub const MEDIA_TOKENS: u64 = 1_500;

/// Prefixes that are remembered to tell what was sent before. Above it all are forgotten: a million blocks are beyond any test.
const MAX_PREFIXES: usize = 1 << 20;

/// The estimate of tokens: four bytes each, rounded up.
pub fn tokens(bytes: usize) -> u64 {
    bytes.div_ceil(4) as u64
}

/// The time of the cache. Tests move a manual one, so that five minutes need not pass.
#[derive(Clone, Debug)]
pub struct Clock {
    started: Instant,
    manual: Option<Arc<Mutex<Duration>>>,
}

impl Clock {
    /// The machine's monotonic clock.
    pub fn system() -> Self {
        Self {
            started: Instant::now(),
            manual: None,
        }
    }

    /// A clock that stands still until it is [advanced](Self::advance). Its clones show the same time.
    pub fn manual() -> Self {
        Self {
            started: Instant::now(),
            manual: Some(Arc::default()),
        }
    }

    /// Moves a manual clock; a system clock ignores it.
    pub fn advance(&self, by: Duration) {
        if let Some(manual) = &self.manual {
            *manual.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
    }

    fn now(&self) -> Duration {
        match &self.manual {
            Some(manual) => *manual.lock().unwrap_or_else(PoisonError::into_inner),
            None => self.started.elapsed(),
        }
    }
}

/// Settings of the simulation.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Off: all tokens are plain input and nothing is remembered.
    pub enabled: bool,
    /// The shortest prefix that is cached, in tokens.
    pub min_tokens: u64,
    /// The same for single models.
    pub min_tokens_by_model: BTreeMap<String, u64>,
    /// The clock by which entries end.
    pub clock: Clock,
}

impl Default for CacheOptions {
    /// On, 1,024 tokens for every model (the API's documented minimum for most), the system clock.
    fn default() -> Self {
        Self {
            enabled: true,
            min_tokens: 1_024,
            min_tokens_by_model: BTreeMap::new(),
            clock: Clock::system(),
        }
    }
}

/// What the cache made of one request. `read + created_5m + created_1h + input` is `total`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// Tokens of the whole request.
    pub total: u64,
    /// Tokens read from the cache.
    pub read: u64,
    /// Tokens written for five minutes.
    pub created_5m: u64,
    /// Tokens written for an hour.
    pub created_1h: u64,
    /// Tokens neither read nor written.
    pub input: u64,
    /// Tokens of the longest prefix that an earlier request of this model had too, cached or not: the most that could
    /// have been read.
    pub prior: u64,
    /// Breakpoints in the request.
    pub breakpoints: usize,
    /// Blocks in the request.
    pub blocks: usize,
}

impl CacheReport {
    /// The share of the prior tokens that was read, from 0 to 1; `None` if nothing was sent before.
    pub fn share_read(&self) -> Option<f64> {
        (self.prior > 0).then(|| self.read as f64 / self.prior as f64)
    }

    /// The `usage` fields of a response, without `output_tokens`.
    pub fn usage(&self) -> Map<String, Value> {
        let usage = json!({
            "input_tokens": self.input,
            "cache_creation_input_tokens": self.created_5m + self.created_1h,
            "cache_read_input_tokens": self.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": self.created_5m,
                "ephemeral_1h_input_tokens": self.created_1h,
            },
        });
        match usage {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    ttl: Duration,
    ends_at: Duration,
}

/// A block of a request: the digest of everything up to its end, the tokens up to its end, its mark.
#[derive(Clone, Copy, Debug)]
struct Block {
    prefix: u64,
    tokens: u64,
    mark: Option<Duration>,
}

/// The cache of all models.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    entries: HashMap<u64, Entry>,
    sent: HashMap<u64, ()>,
}

/// The tokens of a request, for `count_tokens`.
pub(crate) fn count(request: &Value) -> u64 {
    blocks(request).last().map_or(0, |block| block.tokens)
}

impl Cache {
    /// Looks a request up, writes its breakpoints, and says what came of it.
    pub(crate) fn admit(&mut self, request: &Value, options: &CacheOptions) -> CacheReport {
        let blocks = blocks(request);
        let total = blocks.last().map_or(0, |block| block.tokens);
        let mut report = CacheReport {
            total,
            input: total,
            blocks: blocks.len(),
            breakpoints: blocks.iter().filter(|block| block.mark.is_some()).count(),
            ..CacheReport::default()
        };
        if !options.enabled {
            return report;
        }
        let model = request["model"].as_str().unwrap_or_default();
        let min = options.min_tokens_by_model.get(model).copied();
        let min = min.unwrap_or(options.min_tokens);
        let now = options.clock.now();
        self.entries.retain(|_, entry| entry.ends_at > now);

        let hit = self.longest_read(&blocks, now);
        report.read = hit.map_or(0, |at| blocks[at].tokens);
        let mut paid = report.read;
        for (at, block) in blocks.iter().enumerate() {
            let Some(ttl) = block.mark.filter(|_| block.tokens >= min) else {
                continue;
            };
            if hit.is_none_or(|hit| at > hit) {
                match ttl == HOUR {
                    true => report.created_1h += block.tokens - paid,
                    false => report.created_5m += block.tokens - paid,
                }
                paid = block.tokens;
                self.write(block.prefix, ttl, now);
            } else if self.entries.contains_key(&block.prefix) {
                self.write(block.prefix, ttl, now);
            }
        }
        report.input = total - paid;
        report.prior = self.remember(&blocks);
        report
    }

    fn longest_read(&mut self, blocks: &[Block], now: Duration) -> Option<usize> {
        let marked = |at: &usize| blocks[*at].mark.is_some();
        let hit = (0..blocks.len())
            .rev()
            .filter(marked)
            .find_map(|breakpoint| {
                let first = (breakpoint + 1).saturating_sub(LOOK_BACK_BLOCKS);
                (first..=breakpoint)
                    .rev()
                    .find(|at| self.entries.contains_key(&blocks[*at].prefix))
            })?;
        // Reading an entry begins its time to live anew.
        if let Some(entry) = self.entries.get_mut(&blocks[hit].prefix) {
            entry.ends_at = now + entry.ttl;
        }
        Some(hit)
    }

    fn write(&mut self, prefix: u64, ttl: Duration, now: Duration) {
        let entry = self
            .entries
            .entry(prefix)
            .or_insert(Entry { ttl, ends_at: now });
        entry.ttl = entry.ttl.max(ttl);
        entry.ends_at = entry.ends_at.max(now + entry.ttl);
    }

    /// Remembers the prefixes of a request; gives the tokens of the longest one that was known.
    fn remember(&mut self, blocks: &[Block]) -> u64 {
        let known = |block: &&Block| self.sent.contains_key(&block.prefix);
        let prior = blocks.iter().take_while(known).last();
        let prior = prior.map_or(0, |block| block.tokens);
        if self.sent.len() + blocks.len() > MAX_PREFIXES {
            self.sent.clear();
        }
        self.sent
            .extend(blocks.iter().map(|block| (block.prefix, ())));
        prior
    }
}

const HOUR: Duration = Duration::from_secs(3_600);
const FIVE_MINUTES: Duration = Duration::from_secs(300);

/// The blocks of a request with their running digests; one pass over its bytes.
fn blocks(request: &Value) -> Vec<Block> {
    let mut walk = Walk::default();
    walk.word(request["model"].as_str().unwrap_or_default());
    for tool in list(request, "tools") {
        walk.block("tools", tool);
    }
    match &request["system"] {
        Value::Array(blocks) => blocks.iter().for_each(|block| walk.block("system", block)),
        Value::Null => {}
        text => walk.block("system", text),
    }
    // A changed tool choice or thinking setting leaves tools and system cached and nothing after them (API documentation).
    for setting in ["tool_choice", "thinking"] {
        walk.word(&request[setting].to_string());
    }
    for message in list(request, "messages") {
        let role = message["role"].as_str().unwrap_or_default();
        match &message["content"] {
            Value::Array(blocks) => blocks.iter().for_each(|block| walk.block(role, block)),
            text => walk.block(role, text),
        }
    }
    if let (Some(ttl), Some(last)) = (mark(request), walk.blocks.last_mut()) {
        last.mark = last.mark.or(Some(ttl));
    }
    walk.blocks
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value
        .get(field)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

fn mark(block: &Value) -> Option<Duration> {
    let control = block
        .get("cache_control")
        .filter(|control| !control.is_null())?;
    Some(match control["ttl"].as_str() {
        Some("1h") => HOUR,
        _ => FIVE_MINUTES,
    })
}

#[derive(Default)]
struct Walk {
    hasher: DefaultHasher,
    tokens: u64,
    blocks: Vec<Block>,
    buffer: Vec<u8>,
}

impl Walk {
    fn word(&mut self, word: &str) {
        self.hasher.write(word.as_bytes());
        self.hasher.write_u8(0xff);
    }

    fn block(&mut self, part: &str, block: &Value) {
        self.buffer.clear();
        write_without_mark(block, &mut self.buffer);
        self.tokens += match media(block) {
            true => MEDIA_TOKENS,
            false => tokens(self.buffer.len()),
        };
        self.hasher.write(part.as_bytes());
        self.hasher.write_u64(self.buffer.len() as u64);
        self.hasher.write(&self.buffer);
        self.blocks.push(Block {
            prefix: self.hasher.finish(),
            tokens: self.tokens,
            mark: mark(block),
        });
    }
}

fn media(block: &Value) -> bool {
    matches!(block["type"].as_str(), Some("image" | "document"))
        && block["source"]["type"] == "base64"
}

/// Writes a block's JSON without its own `cache_control`; moving a breakpoint does not change a prefix.
fn write_without_mark(block: &Value, buffer: &mut Vec<u8>) {
    let Value::Object(fields) = block else {
        // A text given as a string is the same prompt as one text block of it.
        if let Value::String(text) = block {
            buffer.extend_from_slice(b"{\"type\":\"text\",\"text\":");
            serde_json::to_writer(&mut *buffer, text).ok();
            buffer.extend_from_slice(b",");
        }
        return;
    };
    buffer.push(b'{');
    for (name, value) in fields.iter().filter(|(name, _)| *name != "cache_control") {
        // Writing into a Vec cannot fail.
        serde_json::to_writer(&mut *buffer, name).ok();
        buffer.push(b':');
        serde_json::to_writer(&mut *buffer, value).ok();
        buffer.push(b',');
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(blocks: &[(u8, Option<bool>)]) -> Value {
        let content: Vec<Value> = blocks
            .iter()
            .map(|(word, mark)| {
                let mut block = json!({"type": "text", "text": format!("word {word}")});
                if let Some(hour) = mark {
                    let ttl = if *hour { "1h" } else { "5m" };
                    block["cache_control"] = json!({"type": "ephemeral", "ttl": ttl});
                }
                block
            })
            .collect();
        json!({"model": "m", "messages": [{"role": "user", "content": content}]})
    }

    proptest! {
        #[test]
        fn the_parts_are_the_whole_and_a_repetition_reads_all_that_was_marked(
            requests in prop::collection::vec(
                prop::collection::vec((0u8..3, prop::option::weighted(0.2, any::<bool>())), 1..30),
                1..6,
            ),
        ) {
            let options = CacheOptions { min_tokens: 0, clock: Clock::manual(), ..CacheOptions::default() };
            let mut cache = Cache::default();
            for blocks in &requests {
                let request = request(blocks);
                let first = cache.admit(&request, &options);
                let sum = first.read + first.created_5m + first.created_1h + first.input;
                prop_assert_eq!(sum, first.total);
                prop_assert_eq!(first.total, count(&request));
                prop_assert!(first.read <= first.prior);
                let again = cache.admit(&request, &options);
                prop_assert_eq!(again.read, first.total - first.input);
                prop_assert_eq!(again.created_5m + again.created_1h, 0);
                prop_assert_eq!(again.prior, first.total);
            }
        }
    }

    #[test]
    fn an_hour_is_not_shortened_and_images_have_a_flat_size() {
        let clock = Clock::manual();
        let options = CacheOptions {
            min_tokens: 0,
            clock: clock.clone(),
            ..CacheOptions::default()
        };
        let mut cache = Cache::default();
        cache.admit(&request(&[(1, Some(true))]), &options);
        cache.admit(&request(&[(1, Some(false))]), &options);
        clock.advance(Duration::from_secs(1_000));
        assert!(cache.admit(&request(&[(1, Some(false))]), &options).read > 0);
        let image = |data: &str| {
            json!({"messages": [{"role": "user", "content": [{"type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": data}}]}]})
        };
        assert_eq!(count(&image("AAAA")), MEDIA_TOKENS);
        assert_eq!(count(&image(&"A".repeat(4_000_000))), MEDIA_TOKENS);
    }
}
