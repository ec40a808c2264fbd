//! The sign-in that expires, and the CLI's own login in the middle of a request. In production shape.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use turnpass::cli::environment::{InheritedCredentials, Snapshot};
use turnpass::cli::installed::Installed;
use turnpass::login::{Login, LoginCoordinator, LoginOptions, LoginPrompt, LoginUi};
use turnpass::secret::Secret;
use turnpass::{ErrorCode, Provider};
use turnpass_lab::rig::{self, MadeUpHome, SignIn};
use turnpass_lab::scenario::{Reply, TokenAnswer};

use crate::bench::{Answer, drain, say, until};
use crate::ground::{Ground, Setup};

/// Pastes a made-up code for each of the CLI's links, or says nothing at all.
#[derive(Default)]
struct Owner {
    prompts: Mutex<Vec<LoginPrompt>>,
    is_silent: bool,
}

impl Owner {
    fn prompts(&self) -> Vec<LoginPrompt> {
        self.prompts.lock().unwrap().clone()
    }
}

impl LoginUi for Owner {
    fn ask<'a>(&'a self, prompt: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        let mut prompts = self.prompts.lock().unwrap();
        prompts.push(prompt.clone());
        if self.is_silent {
            return Box::pin(std::future::pending());
        }
        // The longer form of the link names the state that belongs to its code.
        let state = prompt.link.split("state=").nth(1).unwrap_or("made-up");
        let code = format!("made-up-code-{}#{state}", prompts.len());
        Box::pin(std::future::ready(Some(Secret::new(code.into_bytes()))))
    }
}

/// A ground whose sign-in has expired, and a provider on it that asks this owner.
fn expired(setup: &Setup, owner: &Arc<Owner>, options: LoginOptions) -> (Ground, Provider) {
    provider(setup, SignIn::Expired, owner, options)
}

/// A ground with this sign-in, and a provider on it that asks this owner.
fn provider(
    setup: &Setup,
    sign_in: SignIn,
    owner: &Arc<Owner>,
    options: LoginOptions,
) -> (Ground, Provider) {
    let ground = Ground::with(setup, |_, dir| {
        std::fs::remove_dir_all(dir.join("home")).unwrap();
        MadeUpHome::with(&dir.join("home"), sign_in).unwrap();
    });
    let installed = Installed::new(
        ground.options.claude_path.clone(),
        Snapshot::of_this_process(),
        InheritedCredentials::Strip,
    );
    let login = Login::new(Arc::new(installed), owner.clone())
        .with_coordinator(Arc::new(LoginCoordinator::default()))
        .with_options(options);
    let provider = Provider::new(ground.another()).with_login(login);
    (ground, provider)
}

fn signed_out(setup: &Setup, owner: &Arc<Owner>) -> (Ground, Provider) {
    provider(setup, SignIn::SignedOut, owner, LoginOptions::default())
}

fn refused() -> TokenAnswer {
    TokenAnswer {
        status: 400,
        ..TokenAnswer::default()
    }
}

async fn told(provider: &Provider, text: &str) -> Answer {
    drain(provider.generate(say(text))).await
}

/// No process of a login is left, and none of a generation.
async fn nothing_left(ground: &Ground) {
    ground.all_gone().await;
    let own = i32::try_from(std::process::id()).unwrap();
    until("every process is gone", || rig::descendants(own).is_empty()).await;
}

/// The request pauses, the owner signs in, and it is sent once more; three at once share one prompt.
pub(crate) async fn replay_expired_sign_in_with_a_place_to_ask(setup: Setup) {
    let owner = Arc::new(Owner::default());
    let (ground, provider) = expired(&setup, &owner, LoginOptions::default());
    // The renewal is refused, however often it is tried; the owner's code is not. A renewal of a request that is late finds the new sign-in.
    ground.up.set_token([refused(), TokenAnswer::default()]);
    let answer = told(&provider, "[[say signed in]]").await;
    assert_eq!(answer.text(), "signed in");
    assert_eq!(answer.done().upstream_requests, 1);
    assert_eq!((owner.prompts().len(), ground.count()), (1, 1));
    let (a, b) = tokio::join!(told(&provider, "[[say a]]"), told(&provider, "[[say b]]"));
    assert_eq!((a.text().as_str(), b.text().as_str()), ("a", "b"));
    assert_eq!((owner.prompts().len(), ground.count()), (1, 3));
    provider.shutdown().await.unwrap();
    nothing_left(&ground).await;
    ground.finish().await;
}

/// Three requests that are refused at once wait for one login, and each is sent exactly once more.
pub(crate) async fn replay_requests_that_expire_together_share_one_login(setup: Setup) {
    let owner = Arc::new(Owner::default());
    let (ground, provider) = signed_out(&setup, &owner);
    let all = ["a", "b", "c"].map(|text| {
        let provider = provider.clone();
        async move { told(&provider, &format!("[[say {text}]]")).await }
    });
    let answers = futures_util::future::join_all(all).await;
    let texts: Vec<_> = answers.iter().map(Answer::text).collect();
    assert_eq!(texts, ["a", "b", "c"], "{answers:?}");
    assert_eq!((owner.prompts().len(), ground.count()), (1, 3));
    provider.shutdown().await.unwrap();
    nothing_left(&ground).await;
    ground.finish().await;
}

/// A wrong code gets a fresh link; what expires again after the login is told as it is.
pub(crate) async fn replay_wrong_code_and_second_expiry(setup: Setup) {
    let owner = Arc::new(Owner::default());
    let (ground, provider) = signed_out(&setup, &owner);
    ground.up.set_token([refused(), TokenAnswer::default()]);
    let answer = told(&provider, "[[say at last]]").await;
    assert_eq!(answer.text(), "at last");
    let prompts = owner.prompts();
    assert_eq!((prompts.len(), ground.count()), (2, 1));
    assert_ne!(prompts[0].link, prompts[1].link);
    assert_eq!((prompts[1].attempt, prompts[1].attempts), (2, 3));

    // Three wrong codes: the request's own error, and nothing more was sent.
    provider.shutdown().await.unwrap();
    ground.finish().await;
    let fresh = Arc::new(Owner::default());
    let (ground, provider) = signed_out(&setup, &fresh);
    ground.up.set_token([refused()]);
    let answer = told(&provider, "[[say never]]").await;
    assert_eq!(answer.code(), Some(ErrorCode::Auth));
    assert!(
        answer.error().detail().contains("none of 3"),
        "{}",
        answer.error()
    );
    assert_eq!((fresh.prompts().len(), ground.count()), (3, 0));

    // Signed in, and refused by the service all the same: told, without another prompt.
    ground.up.set_token([TokenAnswer::default(), refused()]);
    for _ in 0..6 {
        ground
            .up
            .enqueue(Reply::error(401, "authentication_error", "no"));
    }
    let answer = told(&provider, "x").await;
    assert_eq!(answer.code(), Some(ErrorCode::Auth), "{:?}", answer.end);
    assert_eq!(fresh.prompts().len(), 4, "one more login and no loop");
    assert!(ground.count() <= 2, "{}", ground.count());
    provider.shutdown().await.unwrap();
    nothing_left(&ground).await;
    ground.finish().await;
}

/// An owner who does not answer in time, a host that leaves, and a shutdown: no process of the login is left after each.
pub(crate) async fn replay_a_login_that_nobody_completes(setup: Setup) {
    let silent = || {
        Arc::new(Owner {
            is_silent: true,
            ..Owner::default()
        })
    };
    let short = LoginOptions {
        code_timeout: Duration::from_millis(300),
        ..LoginOptions::default()
    };
    let owner = silent();
    let (ground, provider) = expired(&setup, &owner, short);
    ground.up.set_token([refused()]);
    let answer = told(&provider, "x").await;
    assert_eq!(answer.code(), Some(ErrorCode::Auth));
    assert!(
        answer.error().detail().contains("no code came"),
        "{}",
        answer.error()
    );
    assert_eq!((owner.prompts().len(), ground.count()), (1, 0));
    nothing_left(&ground).await;
    provider.shutdown().await.unwrap();
    ground.finish().await;

    let owner = silent();
    let (ground, provider) = expired(&setup, &owner, LoginOptions::default());
    ground.up.set_token([refused()]);
    let generation = provider.generate(say("x"));
    until("the prompt", || owner.prompts().len() == 1).await;
    drop(generation);
    nothing_left(&ground).await;
    let generation = provider.generate(say("x"));
    until("another prompt", || owner.prompts().len() == 2).await;
    crate::bench::within("shutdown", provider.shutdown())
        .await
        .unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(rig::descendants(own).is_empty(), "at once after a shutdown");
    let answer = drain(generation).await;
    assert_eq!(
        (answer.code(), ground.count()),
        (Some(ErrorCode::Closed), 0)
    );
    ground.finish().await;
}
