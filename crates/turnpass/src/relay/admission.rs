//! Who is let through: the head of a request to the relay is judged before its body is read. Pure.
//!
//! One lane belongs to one CLI process. A generation arms the lane; the first Messages request on the lane's secret
//! path then claims the admission, and every later one is refused with 410, which stops the CLI at once on 2.1.283 to
//! 2.1.332 (400 and 404 provoke more requests, 409 and 5xx back off). After an upstream 401 the same body is admitted
//! once more, because that is how the CLI renews its token.

use http::{HeaderMap, Method, StatusCode, Uri, header};

use crate::loopback::origin::{Origin, origin_of};
use crate::secret::Secret;

/// Requests without the placeholder that may come before the real one (a title, a probe). More end the generation,
/// since a CLI that asks so often is not the one that was measured.
pub(crate) const MISFITS_LIMIT: u32 = 4;

/// Where a lane stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No generation runs: nothing is admitted.
    Idle,
    /// A generation waits for the CLI's request.
    Armed,
    /// A generation is being primed or was dropped: the request is answered here and goes nowhere.
    Local,
    /// The admission is taken.
    Claimed,
    /// The upstream answered 401: the same body may come once more.
    Readmit,
    /// The second admission is taken; none follows.
    ClaimedAgain,
    /// The admission is used up.
    Spent,
}

/// The admission of one lane.
#[derive(Debug)]
pub(crate) struct Admission {
    stage: Stage,
    refused: u32,
    misfits: u32,
}

/// What to do with a request, by its head alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// Read the body and send it upstream.
    Admit,
    /// Read the body (bounded) and answer with the synthetic reply; nothing goes upstream.
    Local,
    /// Answer with this status, without reading the body.
    Refuse(StatusCode, Refusal),
}

/// Why a request was refused. Each is a fixed word: nothing of the request is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// The path does not carry the lane's secret, or is none that the relay serves.
    Path,
    /// The Host is not the relay's own address.
    Host,
    /// A browser's request.
    Origin,
    /// Another method than POST.
    Method,
    /// A body whose length cannot be trusted (chunked, repeated or missing length).
    Framing,
    /// The announced body is above the limit.
    TooLarge,
    /// A key instead of the subscription's bearer.
    Key,
    /// No generation waits for a request.
    NotArmed,
    /// The admission is used up.
    Spent,
}

impl Refusal {
    /// The word in diagnostics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Host => "host",
            Self::Origin => "origin",
            Self::Method => "method",
            Self::Framing => "framing",
            Self::TooLarge => "too_large",
            Self::Key => "key",
            Self::NotArmed => "not_armed",
            Self::Spent => "spent",
        }
    }

    /// Whether the CLI itself made the request, so that it counts as another generation that it wanted.
    pub(crate) fn is_extra_generation(self) -> bool {
        matches!(self, Self::Spent | Self::NotArmed)
    }
}

/// The address and secret of a lane.
#[derive(Debug)]
pub(crate) struct LaneAddress {
    /// The port of the lane's listener on 127.0.0.1.
    pub(crate) port: u16,
    /// The first path segment.
    pub(crate) secret: Secret,
}

impl LaneAddress {
    /// The path below the secret, when the secret is right.
    pub(crate) fn below<'a>(&self, uri: &'a Uri) -> Option<&'a str> {
        let rest = uri.path().strip_prefix('/')?;
        let (secret, below) = rest.split_at_checked(rest.find('/').unwrap_or(rest.len()))?;
        self.secret.matches(secret.as_bytes()).then_some(below)
    }
}

/// Largest body of the CLI that is read; the relay document's 8 MiB.
pub(crate) const NATIVE_REQUEST_BYTES: u64 = 8 * 1024 * 1024;

/// The path of the one request that is served, below the secret.
pub(crate) const MESSAGES_PATH: &str = "/v1/messages";

impl Default for Admission {
    fn default() -> Self {
        Self {
            stage: Stage::Idle,
            refused: 0,
            misfits: 0,
        }
    }
}

impl Admission {
    /// Where the lane stands.
    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// Requests of the CLI that were refused since the lane was armed.
    pub(crate) fn refused(&self) -> u32 {
        self.refused
    }

    /// A generation begins; its request may come.
    pub(crate) fn arm(&mut self) {
        *self = Self {
            stage: Stage::Armed,
            ..Self::default()
        };
    }

    /// The next request is answered here (priming, or a generation that was dropped before its request came).
    pub(crate) fn arm_local(&mut self) {
        *self = Self {
            stage: Stage::Local,
            ..Self::default()
        };
    }

    /// The generation is over, however it ended.
    pub(crate) fn disarm(&mut self) {
        self.stage = Stage::Idle;
    }

    /// The generation was dropped: a request that has not come yet is answered here, one that is on its way is spent.
    pub(crate) fn void(&mut self) {
        self.stage = match self.stage {
            Stage::Armed => Stage::Local,
            Stage::Idle | Stage::Local => self.stage,
            _ => Stage::Spent,
        };
    }

    /// Judges a head. [`Judgement::Admit`] and [`Judgement::Local`] have taken the admission.
    pub(crate) fn judge(
        &mut self,
        address: &LaneAddress,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Judgement {
        if let Err((status, refusal)) = check_head(address, method, uri, headers) {
            return Judgement::Refuse(status, refusal);
        }
        match self.stage {
            Stage::Armed => {
                self.stage = Stage::Claimed;
                Judgement::Admit
            }
            Stage::Readmit => {
                self.stage = Stage::ClaimedAgain;
                Judgement::Admit
            }
            Stage::Local => {
                self.stage = Stage::Spent;
                Judgement::Local
            }
            Stage::Idle => self.refuse(Refusal::NotArmed),
            Stage::Claimed | Stage::ClaimedAgain | Stage::Spent => self.refuse(Refusal::Spent),
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Judgement {
        self.refused = self.refused.saturating_add(1);
        Judgement::Refuse(StatusCode::GONE, refusal)
    }

    /// The body that was read is not the placeholder's: the claim is given back, and the request is refused.
    ///
    /// Returns false when this happened too often.
    #[must_use]
    pub(crate) fn give_back(&mut self) -> bool {
        self.misfits += 1;
        self.refused = self.refused.saturating_add(1);
        if self.stage == Stage::Claimed && self.misfits <= MISFITS_LIMIT {
            self.stage = Stage::Armed;
            return true;
        }
        self.stage = Stage::Spent;
        false
    }

    /// Whether a body may go upstream: the first may, the second only when it is the first one again. One that may not
    /// counts as refused.
    #[must_use]
    pub(crate) fn may_send(&mut self, same_as_first: bool) -> bool {
        let may = match self.stage {
            Stage::Claimed => true,
            Stage::ClaimedAgain => same_as_first,
            _ => false,
        };
        self.refused = self.refused.saturating_add(u32::from(!may));
        may
    }

    /// The upstream answered. Returns whether the same body may come once more.
    pub(crate) fn answered(&mut self, status: StatusCode) -> bool {
        let again = self.stage == Stage::Claimed && status == StatusCode::UNAUTHORIZED;
        self.stage = if again { Stage::Readmit } else { Stage::Spent };
        again
    }
}

fn check_head(
    address: &LaneAddress,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<(), (StatusCode, Refusal)> {
    match origin_of(headers, address.port) {
        Origin::Here => {}
        Origin::Page => return Err((StatusCode::FORBIDDEN, Refusal::Origin)),
        Origin::OtherHost => return Err((StatusCode::FORBIDDEN, Refusal::Host)),
    }
    let below = address
        .below(uri)
        .ok_or((StatusCode::NOT_FOUND, Refusal::Path))?;
    if below != MESSAGES_PATH {
        return Err((StatusCode::NOT_FOUND, Refusal::Path));
    }
    if *method != Method::POST {
        return Err((StatusCode::NOT_FOUND, Refusal::Method));
    }
    if headers.contains_key("x-api-key") {
        return Err((StatusCode::GONE, Refusal::Key));
    }
    check_framing(headers)
}

fn check_framing(headers: &HeaderMap) -> Result<(), (StatusCode, Refusal)> {
    let bad = (StatusCode::GONE, Refusal::Framing);
    if headers.contains_key(header::TRANSFER_ENCODING)
        || headers.contains_key(header::CONTENT_ENCODING)
    {
        return Err(bad);
    }
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let length = lengths
        .next()
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
        .ok_or(bad)?;
    if lengths.next().is_some() {
        return Err(bad);
    }
    if length > NATIVE_REQUEST_BYTES {
        return Err((StatusCode::PAYLOAD_TOO_LARGE, Refusal::TooLarge));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lane() -> LaneAddress {
        LaneAddress {
            port: 4321,
            secret: Secret::new(*b"s3cret"),
        }
    }

    fn head() -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, "127.0.0.1:4321".parse().unwrap());
        headers.insert(header::CONTENT_LENGTH, "12".parse().unwrap());
        headers
    }

    fn judge(
        admission: &mut Admission,
        method: &str,
        path: &str,
        headers: &HeaderMap,
    ) -> Judgement {
        admission.judge(
            &lane(),
            &method.parse().unwrap(),
            &path.parse().unwrap(),
            headers,
        )
    }

    fn good(admission: &mut Admission) -> Judgement {
        judge(admission, "POST", "/s3cret/v1/messages?beta=true", &head())
    }

    const GONE: StatusCode = StatusCode::GONE;

    #[test]
    fn one_request_is_admitted_and_every_later_one_is_gone() {
        let mut admission = Admission::default();
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::NotArmed)
        );
        admission.arm();
        assert_eq!(good(&mut admission), Judgement::Admit);
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
        assert!(!admission.answered(StatusCode::OK));
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
        assert_eq!(admission.refused(), 2);
        admission.arm();
        assert_eq!(
            (good(&mut admission), admission.refused()),
            (Judgement::Admit, 0)
        );
    }

    #[test]
    fn after_a_401_the_same_body_is_admitted_once_more() {
        let mut admission = Admission::default();
        admission.arm();
        assert_eq!(good(&mut admission), Judgement::Admit);
        assert!(admission.may_send(false));
        assert!(admission.answered(StatusCode::UNAUTHORIZED));
        assert_eq!(good(&mut admission), Judgement::Admit);
        assert!(admission.may_send(true) && !admission.may_send(false));
        assert!(!admission.answered(StatusCode::UNAUTHORIZED));
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
    }

    #[test]
    fn only_a_401_opens_the_second_admission() {
        for status in [200, 400, 403, 404, 429, 500, 529] {
            let mut admission = Admission::default();
            admission.arm();
            good(&mut admission);
            assert!(
                !admission.answered(StatusCode::from_u16(status).unwrap()),
                "{status}"
            );
            assert_eq!(
                good(&mut admission),
                Judgement::Refuse(GONE, Refusal::Spent),
                "{status}"
            );
        }
    }

    #[test]
    fn bug_094_a_request_without_the_placeholder_gives_the_admission_back() {
        let mut admission = Admission::default();
        admission.arm();
        for _ in 0..MISFITS_LIMIT {
            assert_eq!(good(&mut admission), Judgement::Admit);
            assert!(admission.give_back());
        }
        assert_eq!(good(&mut admission), Judgement::Admit);
        assert!(!admission.give_back());
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
    }

    #[test]
    fn a_dropped_generation_is_answered_here() {
        let mut admission = Admission::default();
        admission.arm();
        admission.void();
        assert_eq!(good(&mut admission), Judgement::Local);
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
        admission.arm();
        good(&mut admission);
        admission.void();
        assert_eq!(
            good(&mut admission),
            Judgement::Refuse(GONE, Refusal::Spent)
        );
        assert!(!admission.may_send(true));
    }

    #[test]
    fn bug_125_a_foreign_head_is_refused_without_effect() {
        let with = |name: header::HeaderName, value: &str| {
            let mut headers = head();
            headers.insert(name, value.parse().unwrap());
            headers
        };
        let mut two_hosts = head();
        two_hosts.append(header::HOST, "127.0.0.1:4321".parse().unwrap());
        let mut two_lengths = head();
        two_lengths.append(header::CONTENT_LENGTH, "12".parse().unwrap());
        let mut no_length = head();
        no_length.remove(header::CONTENT_LENGTH);
        let ok = "/s3cret/v1/messages";
        let cases = [
            ("POST", "/wrong/v1/messages", head(), 404, Refusal::Path),
            ("POST", "/v1/messages", head(), 404, Refusal::Path),
            ("POST", "/s3cret", head(), 404, Refusal::Path),
            ("POST", "/s3cretx/v1/messages", head(), 404, Refusal::Path),
            (
                "POST",
                "/s3cret/v1/messages/count_tokens",
                head(),
                404,
                Refusal::Path,
            ),
            ("HEAD", "/s3cret/api/hello", head(), 404, Refusal::Path),
            ("GET", ok, head(), 404, Refusal::Method),
            (
                "POST",
                ok,
                with(header::ORIGIN, "https://evil.example"),
                403,
                Refusal::Origin,
            ),
            (
                "POST",
                ok,
                with(header::ORIGIN, "null"),
                403,
                Refusal::Origin,
            ),
            (
                "POST",
                ok,
                with(header::HOST, "evil.example"),
                403,
                Refusal::Host,
            ),
            (
                "POST",
                ok,
                with(header::HOST, "localhost:4321"),
                403,
                Refusal::Host,
            ),
            ("POST", ok, two_hosts, 403, Refusal::Host),
            (
                "POST",
                ok,
                with(header::TRANSFER_ENCODING, "chunked"),
                410,
                Refusal::Framing,
            ),
            (
                "POST",
                ok,
                with(header::CONTENT_ENCODING, "gzip"),
                410,
                Refusal::Framing,
            ),
            ("POST", ok, two_lengths, 410, Refusal::Framing),
            ("POST", ok, no_length, 410, Refusal::Framing),
            (
                "POST",
                ok,
                with(header::CONTENT_LENGTH, "8388609"),
                413,
                Refusal::TooLarge,
            ),
            (
                "POST",
                ok,
                with("x-api-key".parse().unwrap(), "k"),
                410,
                Refusal::Key,
            ),
        ];
        for (method, path, headers, status, refusal) in cases {
            let mut admission = Admission::default();
            admission.arm();
            let wanted = Judgement::Refuse(StatusCode::from_u16(status).unwrap(), refusal);
            assert_eq!(
                judge(&mut admission, method, path, &headers),
                wanted,
                "{method} {path} {headers:?}"
            );
            assert_eq!(
                admission.stage(),
                Stage::Armed,
                "the admission is still there"
            );
        }
    }

    proptest! {
        #[test]
        fn never_more_than_two_bodies_go_upstream(steps in proptest::collection::vec(0u8..5, 0..40)) {
            let mut admission = Admission::default();
            admission.arm();
            let (mut sent, mut reading) = (0, 0);
            for step in steps {
                match step {
                    0 | 1 => reading += u32::from(good(&mut admission) == Judgement::Admit),
                    2 if reading > 0 && admission.may_send(true) => {
                        sent += 1;
                        reading -= 1;
                        admission.answered(StatusCode::UNAUTHORIZED);
                    }
                    3 if reading > 0 && admission.may_send(true) => {
                        sent += 1;
                        reading -= 1;
                        admission.answered(StatusCode::OK);
                    }
                    4 => admission.void(),
                    _ => {}
                }
            }
            prop_assert!(sent <= 2);
        }
    }
}
