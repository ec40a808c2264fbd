//! `turnpass auth status`: whether the CLI is signed in, by its own word.

use std::time::SystemTime;

use serde_json::{Value, json};
use turnpass::cli::auth::AuthStatus;
use turnpass::{Error, ErrorCode};

use crate::context::{self, Context};
use crate::exit::{Exit, Fault, exit_of};
use crate::settings::Values;
use crate::terminal::visible;

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Ask `claude auth status`; no credential file is read
    Status(Box<StatusArgs>),
}

#[derive(clap::Args, Debug)]
struct StatusArgs {
    /// Print one JSON object in place of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    values: Values,
}

impl Args {
    pub(crate) fn wants_json(&self) -> bool {
        let What::Status(args) = &self.what;
        args.json
    }
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let What::Status(args) = args.what;
    let settings = context.settings(args.values)?;
    let installed = context::installed(&settings);
    let asked = async {
        installed.checked().await?;
        // What it says is read below: an answer that is no sign-in is no fault of this command.
        let _ = installed.signed_in().await;
        Ok::<_, Error>(installed.last_sign_in())
    };
    let status = tokio::select! {
        biased;
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        asked = asked => asked?,
    };
    installed.shutdown().await;
    let (status, _) = status.ok_or_else(|| Error::new(ErrorCode::AuthUnknown, ""))?;
    let (text, object, exit) = told(status);
    match args.json {
        true => super::print(&format!("{object}\n"))?,
        false => super::print(&format!("{}\n", visible(&text)))?,
    };
    Ok(exit)
}

/// The status as text and as JSON, with the exit code. The text of an unclear answer stays out of both: it may name the
/// account.
fn told(status: AuthStatus) -> (String, Value, Exit) {
    let word = match &status {
        AuthStatus::SignedIn(_) => "signed_in",
        AuthStatus::SignedOut => "signed_out",
        AuthStatus::Ineligible { .. } => "ineligible",
        AuthStatus::Unknown { .. } => "unknown",
    };
    match status.accept() {
        Ok(signed_in) => {
            let plan = signed_in.subscription;
            let expires = signed_in.expires_at.and_then(unix);
            let mut text = format!(
                "signed in with claude.ai, plan {}",
                plan.as_deref().unwrap_or("unnamed")
            );
            if let Some(tier) = &signed_in.plan_tier {
                text.push_str(&format!(", tier {tier}"));
            }
            text.push_str(". This is what the CLI has stored; only a request shows whether the service takes it.");
            let object = json!({
                "status": word,
                "subscription": plan,
                "plan_tier": signed_in.plan_tier,
                "expires_at": expires,
                "exit": Exit::Done as u8,
            });
            (text, object, Exit::Done)
        }
        Err(error) => {
            let exit = exit_of(error.code());
            let object = json!({
                "status": word,
                "code": error.code().as_str(),
                "said": error.detail(),
                "next": error.remedy(),
                "exit": exit as u8,
            });
            (error.to_string(), object, exit)
        }
    }
}

fn unix(at: SystemTime) -> Option<u64> {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpass::cli::auth::SignedIn;

    #[test]
    fn each_status_names_the_command_to_run_and_no_account() {
        let unknown = AuthStatus::Unknown {
            reason: "loggedIn is missing".to_owned(),
            text: "marker@example.invalid".to_owned(),
        };
        let ineligible = AuthStatus::Ineligible {
            auth_method: "api_key".to_owned(),
            api_provider: "firstParty".to_owned(),
        };
        for (status, word, command) in [
            (
                AuthStatus::SignedOut,
                "signed_out",
                "claude auth login --claudeai",
            ),
            (ineligible, "ineligible", "claude auth logout"),
            (unknown, "unknown", "claude auth status"),
        ] {
            let (text, object, exit) = told(status);
            assert_eq!((exit, &object["status"]), (Exit::SignedOut, &json!(word)));
            assert!(text.contains(command), "{text}");
            assert!(object["next"].as_str().unwrap().contains(command));
            assert!(!format!("{text}{object}").contains("marker"));
        }
    }

    #[test]
    fn a_sign_in_says_its_plan() {
        let signed_in = SignedIn {
            subscription: Some("max".to_owned()),
            plan_tier: Some("max_5x".to_owned()),
            expires_at: None,
        };
        let (text, object, exit) = told(AuthStatus::SignedIn(signed_in));
        assert_eq!(exit, Exit::Done);
        assert!(
            text.starts_with("signed in with claude.ai, plan max, tier max_5x."),
            "{text}"
        );
        assert_eq!(object["subscription"], "max");
    }
}
