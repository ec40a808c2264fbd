//! The settings file that every child gets: what isolates it from the person's own configuration.
//!
//! It goes by file (`--settings PATH`), never on the command line. A settings file that is no JSON is ignored without a
//! word (2.1.294, 2.1.310, 2.1.332), so it is only ever written by [`settings`].

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Built-in plugins by name, from the 2.1.332 binary. They load whatever the setting sources say.
pub const BUILTIN_PLUGINS: &[&str] = &[
    "agents-md",
    "claude-test",
    "diff",
    "easel",
    "hipaa-default",
    "mermaid",
    "mods-guide",
    "plugin-authoring",
    "privacy",
    "promos",
    "responsive-mode",
    "sec-default",
    "telemetry",
    "tips",
    "you-should-know",
];

/// Days for which the CLI keeps old sessions: a hundred years. Without the person's own settings the CLI would clean up
/// by its default of 30 days (2.1.294 and 2.1.310 note a clean-up at their first start) and delete their history.
pub const CLEANUP_PERIOD_DAYS: u32 = 36_500;

/// Both spellings of a built-in plugin's id: with the prefix from 2.1.287 on, without it before.
pub fn plugin_ids(name: &str) -> [String; 2] {
    [
        format!("{name}@builtin"),
        format!("cc-plugin-{name}@builtin"),
    ]
}

/// The settings of a child.
///
/// `learned` are ids of built-in plugins that slipped through before; `env` are variables that belong into a private
/// file and not into the process's environment, and that win over it (2.1.294, 2.1.310, 2.1.332).
pub fn settings(learned: &BTreeSet<String>, env: &[(&str, &str)]) -> Value {
    let names = BUILTIN_PLUGINS.iter().flat_map(|name| plugin_ids(name));
    let plugins: Map<_, _> = names
        .chain(learned.iter().cloned())
        .map(|id| (id, Value::Bool(false)))
        .collect();
    let mut settings = json!({
        // The host owns compaction.
        "autoCompactEnabled": false,
        // Fast mode always bills usage credits.
        "fastMode": false,
        // A person's hooks would run in every request, and a Stop hook would see its own answer again.
        "disableAllHooks": true,
        // MEMORY.md reaches the request in spite of empty setting sources otherwise (all versions).
        "autoMemoryEnabled": false,
        // A changing token count defeats the prompt cache; the variable of that name is not read by every version.
        "totalTokensReminder": "off",
        // A flagged request must fail, not go to another model.
        "switchModelsOnFlag": false,
        "cleanupPeriodDays": CLEANUP_PERIOD_DAYS,
    });
    settings["enabledPlugins"] = Value::Object(plugins);
    if !env.is_empty() {
        let env: Map<_, _> = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Value::from(*value)))
            .collect();
        settings["env"] = Value::Object(env);
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bug_040_every_built_in_plugin_is_off_in_both_spellings() {
        let all = settings(&BTreeSet::new(), &[]);
        for name in BUILTIN_PLUGINS {
            assert_eq!(all["enabledPlugins"][format!("{name}@builtin")], false);
            assert_eq!(
                all["enabledPlugins"][format!("cc-plugin-{name}@builtin")],
                false
            );
        }
        assert_eq!(
            all["enabledPlugins"].as_object().unwrap().len(),
            2 * BUILTIN_PLUGINS.len()
        );
    }

    #[test]
    fn a_learned_plugin_is_off_too() {
        let learned = BTreeSet::from(["cc-plugin-brand-new@builtin".to_owned()]);
        let all = settings(&learned, &[]);
        assert_eq!(all["enabledPlugins"]["cc-plugin-brand-new@builtin"], false);
    }

    #[test]
    fn bug_037_the_persons_old_sessions_are_kept() {
        let all = settings(&BTreeSet::new(), &[]);
        assert_eq!(all["cleanupPeriodDays"], 36_500);
    }

    #[test]
    fn every_switch_is_there_and_nothing_else() {
        let mut all = settings(&BTreeSet::new(), &[]);
        all.as_object_mut().unwrap().remove("enabledPlugins");
        assert_eq!(
            all,
            json!({
                "autoCompactEnabled": false,
                "fastMode": false,
                "disableAllHooks": true,
                "autoMemoryEnabled": false,
                "totalTokensReminder": "off",
                "switchModelsOnFlag": false,
                "cleanupPeriodDays": 36_500,
            })
        );
    }

    #[test]
    fn variables_go_into_the_file() {
        let all = settings(&BTreeSet::new(), &[("A", "1"), ("B", "{\"x\":1}")]);
        assert_eq!(all["env"], json!({"A": "1", "B": "{\"x\":1}"}));
    }
}
