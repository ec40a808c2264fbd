//! `turnpass config path|show`: where the configuration is, and what holds.

use crate::config_file;
use crate::context::environment;
use crate::exit::{Exit, Fault};
use crate::settings::{KEYS, Settings, Values};

/// The arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Print the path of the configuration file, whether it exists or not
    Path,
    /// Print every key with its value and where it comes from
    Show(Box<Values>),
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<Exit, Fault> {
    match args.what {
        What::Path => {
            let (path, _) = config_file::path(&environment)?;
            super::print(&format!("{}\n", path.display()))
        }
        What::Show(flags) => {
            let settings = Settings::load(*flags, &environment)?;
            let mut text = String::new();
            for ((key, value, source), (_, variable)) in settings.shown().into_iter().zip(KEYS) {
                let line = match value {
                    Some(value) => format!("{key} = {value}  # {source}"),
                    None => format!("# {key} is not set ({variable})"),
                };
                text.push_str(&line);
                text.push('\n');
            }
            // Tables come last: a key behind one would belong to it.
            text.push_str(&match settings.prices.is_empty() {
                true => "# prices is not set\n".to_owned(),
                false => settings.prices.shown(),
            });
            super::print(&text)
        }
    }
}
