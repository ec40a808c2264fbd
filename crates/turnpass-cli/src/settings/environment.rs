//! The layer of settings that the environment gives.

use super::*;

/// What the environment says. A variable that is set but empty counts as not set.
pub(super) fn from_environment(environment: Environment<'_>) -> Result<Values, Fault> {
    let text = |key: usize| -> Result<Option<String>, Fault> {
        let name = KEYS[key].1;
        match environment(name) {
            None => Ok(None),
            Some(value) if value.is_empty() => Ok(None),
            Some(value) => value.into_string().map(Some).map_err(|_| {
                Fault::usage(format!("{name} is not UTF-8"), "Set it again, or unset it.")
            }),
        }
    };
    fn read<T: FromStr<Err: fmt::Display>>(
        key: usize,
        text: Option<String>,
    ) -> Result<Option<T>, Fault> {
        let parsed = text.map(|text| text.parse::<T>()).transpose();
        parsed.map_err(|error| {
            Fault::usage(
                format!("{}: {error}", KEYS[key].1),
                "Set it again, or unset it.",
            )
        })
    }
    let words = |key: usize| -> Result<Option<Vec<ToolWord>>, Fault> {
        let Some(list) = text(key)? else {
            return Ok(None);
        };
        let words = list.split(',').map(|word| read(key, Some(word.to_owned())));
        Ok(Some(
            words
                .collect::<Result<Vec<_>, _>>()?
                .into_iter()
                .flatten()
                .collect(),
        ))
    };
    Ok(Values {
        transport: read(0, text(0)?)?,
        process: read(1, text(1)?)?,
        reseed: read(2, text(2)?)?,
        tool_carrier: read(3, text(3)?)?,
        memory_mb: read(4, text(4)?)?,
        model: text(5)?,
        effort: read(6, text(6)?)?,
        allow: words(7)?,
        deny: words(8)?,
        max_rounds: read(9, text(9)?)?,
        claude_path: text(10)?.map(PathBuf::from),
        lab_upstream: text(11)?,
        lab_home: text(12)?.map(PathBuf::from),
        usage_gate: read(13, text(13)?)?,
        max_window_percent: read(14, text(14)?)?,
        max_requests_per_session: read(15, text(15)?)?,
        max_tokens_per_session: read(16, text(16)?)?,
        max_requests_per_day: read(17, text(17)?)?,
        max_tokens_per_day: read(18, text(18)?)?,
        record: text(19)?.map(PathBuf::from),
        keep_records: read(20, text(20)?)?,
        history: read(21, text(21)?)?,
        start_timeout_s: read(22, text(22)?)?,
        idle_timeout_s: read(23, text(23)?)?,
        total_timeout_s: read(24, text(24)?)?,
        compaction: read(25, text(25)?)?,
        compaction_threshold: read(26, text(26)?)?,
        compaction_keep_tokens: read(27, text(27)?)?,
        max_compactions: read(28, text(28)?)?,
        prices: None,
    })
}
