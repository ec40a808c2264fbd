//! `turnpass login`: the CLI's own login, with its link and your code. turnpass signs nobody in and stores nothing.

use std::sync::Arc;

use turnpass::login::{LOGIN_COMMAND, Login};

use crate::context::{self, Context};
use crate::exit::{Exit, Fault};
use crate::settings::{Settings, Values};
use crate::terminal::LoginOnTerminal;

/// What the page about terms says, in two sentences.
const TERMS: &str = "\
This runs the login of the claude program on this machine: sign in with the account of your own subscription only.
Nothing certifies the ways that turnpass uses the program in; usage credits, if you have them on, may be charged.
";

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    values: Values,
}

/// Runs the command.
pub(crate) async fn run(args: Args, context: &Context) -> Result<Exit, Fault> {
    let settings = context.settings(args.values)?;
    let login = of_person(&settings, context)?;
    crate::terminal::tell(&context.style().dim(TERMS))?;
    tokio::select! {
        biased;
        // Whoever leaves last ends the CLI's login.
        () = context.cancel().cancelled() => return Ok(Exit::Cancelled),
        done = login.sign_in() => done?,
    }
    super::print("signed in\n")
}

/// How a command signs in when its person is at the terminal.
pub(crate) fn of_person(settings: &Settings, context: &Context) -> Result<Login, Fault> {
    if !LoginOnTerminal::is_possible() {
        return Err(Fault::usage(
            "a login needs a person at a terminal",
            format!("Run it in one, or run `{LOGIN_COMMAND}` on this machine."),
        ));
    }
    let ui = LoginOnTerminal::new(context.style());
    Ok(Login::new(context::installed(settings), Arc::new(ui)))
}
