use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::*;
use crate::cli::environment::{InheritedCredentials, Snapshot};

/// Longest wait for anything here; a loaded machine needs seconds for what takes milliseconds.
const BOUND: Duration = Duration::from_secs(30);

/// A CLI whose login shows a link with the number of its run, takes the code in `accepted`, and whose status says that it is
/// signed in once that was given.
const CLI: &str = r##"#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) echo "2.1.332 (Claude Code)" ;;
  *"auth status"*)
    if [ -e "$here/in" ]; then echo '{"loggedIn":true,"authMethod":"claude.ai","apiProvider":"firstParty"}'
    else echo '{"loggedIn":false,"authMethod":"none","apiProvider":"firstParty"}'; exit 1; fi ;;
  "auth login --claudeai")
    sleep 1000 &
    echo "$$ $!" >> "$here/pids"
    echo "$TMPDIR" >> "$here/dirs"
    echo run >> "$here/runs"
    n=$(wc -l < "$here/runs" | tr -d ' ')
    printf 'Opening browser to sign in\nvisit:\nhttps://claude.ai/oauth/authorize?z-%s\nPaste code here if prompted > ' "$n"
    if [ -e "$here/browser" ]; then touch "$here/in"; exit 0; fi
    if [ -e "$here/dies" ]; then exit 3; fi
    read -r code || exit 1
    echo "$code" >> "$here/codes"
    if [ "$code" = "good#code" ]; then touch "$here/in"; echo "Login successful."; exit 0; fi
    echo "Couldn't log in: That code wasn't accepted." >&2; exit 1 ;;
esac
"##;

struct Bed {
    dir: tempfile::TempDir,
    installed: Arc<Installed>,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let claude = dir.path().join("claude");
        std::fs::write(dir.path().join("new"), CLI).unwrap();
        std::fs::set_permissions(
            dir.path().join("new"),
            std::fs::Permissions::from_mode(0o755),
        )
        .unwrap();
        // Copied by a child: a file that is open for writing here while another thread forks cannot be executed.
        let copied = std::process::Command::new("cp")
            .arg("-p")
            .arg(dir.path().join("new"))
            .arg(&claude)
            .status();
        assert!(copied.unwrap().success());
        let mut snapshot = Snapshot::of_this_process();
        snapshot.set("HOME", dir.path());
        let installed = Installed::new(Some(claude), snapshot, InheritedCredentials::Strip);
        Self {
            dir,
            installed: Arc::new(installed),
        }
    }

    fn login(&self, ui: Arc<dyn LoginUi>) -> Login {
        Login::new(Arc::clone(&self.installed), ui)
            .with_coordinator(Arc::new(LoginCoordinator::default()))
    }

    fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        Path::join(self.dir.path(), name)
    }

    /// At this moment: no process of any login is there, whatever it started, and no file of it.
    #[track_caller]
    fn nothing_left(&self) {
        let lines = self.lines("pids");
        assert!(!lines.is_empty(), "no login was started");
        // A child of a child is killed with its group, and nobody can wait for the moment that its end takes.
        let end = std::time::Instant::now() + KILLED_LIMIT;
        for pid in lines.iter().flat_map(|line| line.split(' ')) {
            let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // One whose parent was killed is a zombie until the system's first process has reaped it.
            let is_dead =
                |state: &str| state.is_empty() || state.contains(") Z ") || state.contains(") X ");
            while !is_dead(&state()) {
                let now = std::time::Instant::now();
                assert!(now < end, "{pid} is left: {}", state());
                std::thread::yield_now();
            }
        }
        for dir in self.lines("dirs") {
            let private = Path::new(&dir).parent().unwrap();
            assert!(!private.exists(), "{dir} is left");
        }
    }
}

/// From a kill to the end of what was killed, on a busy machine.
const KILLED_LIMIT: Duration = Duration::from_secs(5);

/// Pastes what it was given, in order, and keeps the prompts.
#[derive(Default)]
struct Pastes {
    codes: Mutex<Vec<&'static str>>,
    prompts: Mutex<Vec<LoginPrompt>>,
}

impl Pastes {
    fn of(codes: &[&'static str]) -> Arc<Self> {
        Arc::new(Self {
            codes: Mutex::new(codes.iter().rev().copied().collect()),
            prompts: Mutex::default(),
        })
    }

    fn prompts(&self) -> Vec<LoginPrompt> {
        self.prompts.lock().unwrap().clone()
    }
}

impl LoginUi for Pastes {
    fn ask<'a>(&'a self, prompt: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        self.prompts.lock().unwrap().push(prompt.clone());
        let code = self.codes.lock().unwrap().pop();
        Box::pin(std::future::ready(
            code.map(|code| Secret::new(code.as_bytes())),
        ))
    }
}

async fn bounded<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, work).await.expect("in time")
}

#[tokio::test]
async fn link_steps_and_question_are_one_prompt_and_the_code_reaches_the_cli() {
    let bed = Bed::new();
    let ui = Pastes::of(&[" good#code\n"]);
    let login = bed.login(ui.clone());
    bounded(login.sign_in()).await.unwrap();
    assert_eq!(login.generation(), 1);
    let [prompt] = &ui.prompts()[..] else {
        panic!("{:?}", ui.prompts())
    };
    assert_eq!(prompt.link, "https://claude.ai/oauth/authorize?z-1");
    assert!(prompt.steps.contains(&prompt.link) && prompt.question == QUESTION);
    assert_eq!((prompt.attempt, prompt.attempts), (1, 3));
    assert_eq!(bed.lines("codes"), ["good#code"]);
    bed.nothing_left();
}

#[tokio::test]
async fn a_wrong_code_gets_a_fresh_link_up_to_three_attempts() {
    let bed = Bed::new();
    let ui = Pastes::of(&["bad#code", "no mark", "good#code"]);
    let login = bed.login(ui.clone());
    bounded(login.sign_in()).await.unwrap();
    let links: Vec<_> = ui.prompts().into_iter().map(|prompt| prompt.link).collect();
    assert_eq!(
        links,
        [1, 2, 3].map(|n| format!("https://claude.ai/oauth/authorize?z-{n}"))
    );
    assert!(
        ui.prompts()[1]
            .steps
            .starts_with("That code was not accepted")
    );
    // What cannot be a code is not given to the CLI, which would only ask again.
    assert_eq!(bed.lines("codes"), ["bad#code", "good#code"]);

    let bed = Bed::new();
    let ui = Pastes::of(&["a#1", "a#2", "a#3", "good#code"]);
    let error = bounded(bed.login(ui.clone()).sign_in()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Auth);
    assert!(error.detail().contains("none of 3"), "{error}");
    assert!(!error.to_string().contains("a#1"), "{error}");
    assert_eq!(bed.lines("codes").len(), 3);
    bed.nothing_left();
}

#[tokio::test]
async fn all_who_need_a_sign_in_wait_for_the_same_flow() {
    let bed = Bed::new();
    let ui = Pastes::of(&["good#code"]);
    let login = bed.login(ui.clone());
    let all = (0..8).map(|_| login.recover(0));
    for done in bounded(futures_util::future::join_all(all)).await {
        done.unwrap();
    }
    assert_eq!((ui.prompts().len(), login.generation()), (1, 1));
    // One that began before it and hears of its own expiry only now needs no flow of its own.
    bounded(login.recover(0)).await.unwrap();
    assert_eq!(ui.prompts().len(), 1);
    // One that began after it does.
    let error = bounded(login.recover(1)).await.unwrap_err();
    assert!(error.detail().contains("declined"), "{error}");
    assert_eq!(ui.prompts().len(), 2);
}

/// Never answers.
struct Silent {
    reachable: bool,
}

impl LoginUi for Silent {
    fn reach(&self) -> BoxFuture<'_, bool> {
        match self.reachable {
            true => Box::pin(std::future::ready(true)),
            false => Box::pin(std::future::pending()),
        }
    }

    fn ask<'a>(&'a self, _: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn an_owner_who_cannot_be_reached_or_does_not_answer_is_waited_for_within_bounds() {
    let short = LoginOptions {
        code_timeout: Duration::from_millis(20),
        owner_timeout: Duration::from_millis(20),
        ..LoginOptions::default()
    };
    for (reachable, why) in [(false, "reached"), (true, "no code came")] {
        let bed = Bed::new();
        let login = bed
            .login(Arc::new(Silent { reachable }))
            .with_options(short);
        let error = bounded(login.sign_in()).await.unwrap_err();
        assert!(error.detail().contains(why), "{error}");
        assert_eq!(login.generation(), 0);
        if reachable {
            bed.nothing_left();
        }
    }
    let options = LoginOptions::default();
    assert_eq!(options.attempts, 3);
    assert_eq!(options.code_timeout, Duration::from_secs(600));
    assert_eq!(options.owner_timeout, Duration::from_secs(30));
}

#[tokio::test]
async fn a_flow_that_everybody_left_ends_with_its_process() {
    let bed = Bed::new();
    let login = bed.login(Arc::new(Silent { reachable: true }));
    {
        let mut waiting = Box::pin(login.sign_in());
        let started = async {
            while bed.lines("runs").is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            _ = &mut waiting => panic!("nobody answered"),
            () = bounded(started) => {}
        }
    }
    // The next one starts a flow of its own.
    let ui = Pastes::of(&["good#code"]);
    let again = Login {
        ui,
        ..login.clone()
    };
    bounded(again.sign_in()).await.unwrap();
    assert_eq!(bed.lines("runs").len(), 2);
}

/// Waits for the first login of a bed.
async fn first_run(bed: &Bed) {
    bounded(async {
        while bed.lines("runs").is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn who_looks_while_a_sign_in_succeeds_starts_no_second_one() {
    for _ in 0..10 {
        let bed = Bed::new();
        let ui = Pastes::of(&["good#code"]);
        let login = bed.login(ui.clone());
        let all = (0..4).map(|_| {
            let login = login.clone();
            // Each looks over and over until it sees the success, as requests do whose expiry is reported late.
            tokio::spawn(async move {
                while login.generation() == 0 {
                    login.recover(0).await.unwrap();
                }
                for _ in 0..100 {
                    login.recover(0).await.unwrap();
                }
            })
        });
        for done in bounded(futures_util::future::join_all(all)).await {
            done.unwrap();
        }
        assert_eq!((ui.prompts().len(), login.generation()), (1, 1));
    }
}

#[tokio::test]
async fn a_sign_in_that_the_browser_completes_needs_no_code() {
    let bed = Bed::new();
    std::fs::write(bed.path("browser"), "").unwrap();
    let login = bed.login(Arc::new(Silent { reachable: true }));
    bounded(login.sign_in()).await.unwrap();
    assert_eq!(login.generation(), 1);
    assert!(bed.lines("codes").is_empty());
    bed.nothing_left();
}

#[tokio::test]
async fn a_login_that_ends_while_the_owner_thinks_is_told_at_once() {
    let bed = Bed::new();
    std::fs::write(bed.path("dies"), "").unwrap();
    let login = bed.login(Arc::new(Silent { reachable: true }));
    let error = bounded(login.sign_in()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Auth);
    assert!(error.detail().contains("before a code came"), "{error}");
    assert_eq!((bed.lines("runs").len(), login.generation()), (1, 0));
    bed.nothing_left();
}

/// Panics in the host's own code.
struct Panics;

impl LoginUi for Panics {
    fn ask<'a>(&'a self, _: &'a LoginPrompt) -> BoxFuture<'a, Option<Secret>> {
        Box::pin(async { panic!("a defect of the host") })
    }
}

#[tokio::test]
async fn a_place_to_ask_that_panics_fails_the_flow_and_the_next_one_works() {
    let bed = Bed::new();
    let login = bed.login(Arc::new(Panics));
    let error = bounded(login.sign_in()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Auth);
    let again = Login {
        ui: Pastes::of(&["good#code"]),
        ..login.clone()
    };
    bounded(again.sign_in()).await.unwrap();
    assert_eq!(again.generation(), 1);
}

#[tokio::test]
async fn a_shutdown_ends_a_login_that_is_waited_for() {
    let bed = Bed::new();
    let transport = Failing::with(&[(ErrorCode::Auth, false)]);
    let provider = crate::Provider::new(Shared(Arc::clone(&transport)))
        .with_login(bed.login(Arc::new(Silent { reachable: true })));
    let messages = vec![crate::conversation::Message::user("x")];
    let mut generation = provider.generate(crate::Request::new("sonnet", messages));
    first_run(&bed).await;
    bounded(provider.shutdown()).await.unwrap();
    bed.nothing_left();
    let error = bounded(generation.next()).await.unwrap().unwrap_err();
    assert_eq!((error.code(), transport.asked()), (ErrorCode::Closed, 1));
}

#[tokio::test]
async fn a_provider_that_is_dropped_ends_a_login_that_is_waited_for() {
    let bed = Bed::new();
    let transport = Failing::with(&[(ErrorCode::Auth, false)]);
    let login = bed.login(Arc::new(Silent { reachable: true }));
    let provider = crate::Provider::new(Shared(transport)).with_login(login.clone());
    let messages = vec![crate::conversation::Message::user("x")];
    let mut generation = provider.generate(crate::Request::new("sonnet", messages));
    first_run(&bed).await;
    drop(provider);
    let error = bounded(generation.next()).await.unwrap().unwrap_err();
    assert_eq!(error.code(), ErrorCode::Closed);
    bounded(login.settled()).await;
    bed.nothing_left();
}

#[tokio::test]
async fn a_host_that_leaves_takes_the_login_with_it_unless_another_waits() {
    let bed = Bed::new();
    let transport = Failing::with(&[(ErrorCode::Auth, false), (ErrorCode::Auth, false)]);
    let login = bed.login(Arc::new(Silent { reachable: true }));
    let provider = crate::Provider::new(Shared(transport)).with_login(login.clone());
    let ask = || {
        let messages = vec![crate::conversation::Message::user("x")];
        provider.generate(crate::Request::new("sonnet", messages))
    };
    let (first, second) = (ask(), ask());
    first_run(&bed).await;
    drop(first);
    // Somebody still waits: the flow goes on, and this returns at once.
    bounded(login.settled()).await;
    assert_eq!(bed.lines("runs").len(), 1);
    drop(second);
    bounded(async {
        while login
            .coordinator
            .flight()
            .as_ref()
            .unwrap()
            .held
            .strong_count()
            > 0
        {
            tokio::task::yield_now().await;
        }
        login.settled().await;
    })
    .await;
    bed.nothing_left();
}

#[test]
fn a_code_is_never_printed() {
    let secret = Secret::new(*b"good#code");
    assert!(!format!("{secret:?}").contains("good"));
}

/// Fails with what it is given, in order, before or after a first word; then answers.
#[derive(Debug)]
struct Failing {
    fails: Mutex<Vec<(ErrorCode, bool)>>,
    asked: std::sync::atomic::AtomicU32,
}

impl Failing {
    fn with(fails: &[(ErrorCode, bool)]) -> Arc<Self> {
        Arc::new(Self {
            fails: Mutex::new(fails.iter().rev().copied().collect()),
            asked: std::sync::atomic::AtomicU32::new(0),
        })
    }

    fn asked(&self) -> u32 {
        self.asked.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
struct Shared(Arc<Failing>);

impl crate::Transport for Shared {
    fn kind(&self) -> crate::request::TransportKind {
        crate::request::TransportKind::Replay
    }

    fn generate(&self, _: crate::Request) -> crate::Generation {
        use crate::event::{Done, Event, StopReason, Usage};
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let next = self.0.fails.lock().unwrap().pop();
        let (mut events, generation) = crate::Generation::channel();
        tokio::spawn(async move {
            let text = || Event::Text { text: "w".into() };
            match next {
                Some((code, spoke)) => {
                    if spoke {
                        events.send(text()).await.unwrap();
                    }
                    events.fail(Error::new(code, "the CLI is signed out")).await;
                }
                None => {
                    events.send(text()).await.unwrap();
                    let message = crate::conversation::Message::assistant("w");
                    let done =
                        Done::new(StopReason::EndTurn, message, Usage::default(), "m".into());
                    events.send(Event::Done(done)).await.unwrap();
                }
            }
        });
        generation
    }

    fn shutdown(&self) -> std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

async fn run(transport: &Arc<Failing>, login: Option<Login>) -> (usize, Result<(), Error>) {
    let mut provider = crate::Provider::new(Shared(Arc::clone(transport)));
    if let Some(login) = login {
        provider = provider.with_login(login);
    }
    let messages = vec![crate::conversation::Message::user("x")];
    let mut generation = provider.generate(crate::Request::new("sonnet", messages));
    let mut words = 0;
    while let Some(item) = bounded(generation.next()).await {
        match item {
            Ok(crate::Event::Text { .. }) => words += 1,
            Ok(crate::Event::Done(_)) => return (words, Ok(())),
            Ok(_) => {}
            Err(error) => return (words, Err(error)),
        }
    }
    panic!("no end")
}

#[tokio::test]
async fn a_request_that_fails_for_want_of_a_sign_in_pauses_and_is_sent_exactly_once_more() {
    use ErrorCode::{Auth, RateLimit};
    let expired = [(Auth, false)];
    // With somewhere to ask.
    let (bed, ui) = (Bed::new(), Pastes::of(&["good#code"]));
    let transport = Failing::with(&expired);
    let (words, ended) = run(&transport, Some(bed.login(ui.clone()))).await;
    assert!(ended.is_ok() && words == 1, "{ended:?}");
    assert_eq!((transport.asked(), ui.prompts().len()), (2, 1));
    // Expired again at once: told as it is, no loop.
    let (bed, ui) = (Bed::new(), Pastes::of(&["good#code", "good#code"]));
    let transport = Failing::with(&[(Auth, false), (Auth, false)]);
    let (_, ended) = run(&transport, Some(bed.login(ui.clone()))).await;
    assert_eq!(ended.unwrap_err().code(), Auth);
    assert_eq!((transport.asked(), ui.prompts().len()), (2, 1));
    // Another failure on the second try as well.
    let transport = Failing::with(&[(Auth, false), (RateLimit, false)]);
    let bed = Bed::new();
    let (_, ended) = run(&transport, Some(bed.login(Pastes::of(&["good#code"])))).await;
    assert_eq!(ended.unwrap_err().code(), RateLimit);
    // Without: the request fails, and says which command to run.
    let transport = Failing::with(&expired);
    let (_, ended) = run(&transport, None).await;
    let error = ended.unwrap_err();
    assert!(error.remedy().contains(LOGIN_COMMAND), "{error}");
    assert_eq!(transport.asked(), 1);
}

#[tokio::test]
async fn nothing_is_sent_again_once_something_was_given_out_or_for_another_reason() {
    for fails in [(ErrorCode::Auth, true), (ErrorCode::Overloaded, false)] {
        let (bed, ui) = (Bed::new(), Pastes::of(&["good#code"]));
        let transport = Failing::with(&[fails]);
        let (_, ended) = run(&transport, Some(bed.login(ui.clone()))).await;
        assert_eq!(ended.unwrap_err().code(), fails.0);
        assert_eq!((transport.asked(), ui.prompts().len()), (1, 0));
    }
}

#[tokio::test]
async fn a_failed_sign_in_is_told_with_the_request_s_own_error() {
    let bed = Bed::new();
    let transport = Failing::with(&[(ErrorCode::Auth, false)]);
    let (_, ended) = run(&transport, Some(bed.login(Pastes::of(&[])))).await;
    let error = ended.unwrap_err();
    assert!(error.detail().contains("signed out") && error.detail().contains("declined"));
    assert_eq!(transport.asked(), 1);
}
