//! The splice: what comes out has all other bytes of the body and exactly the given messages; what is refused is refused without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;
use turnpass::wire::splice::NativeBody;

const PLACEHOLDER: &str = "gen-0 placeholder";
const MESSAGES: &str =
    r#"[ {"role":"user","content":"\u00e9 \"x\""}, {"role":"assistant","content":[]} ]"#;

fuzz_target!(|body: &[u8]| {
    let messages: &RawValue = serde_json::from_str(MESSAGES).expect("an array");
    let Ok(native) = NativeBody::read(body) else {
        return;
    };
    let inspection = native.inspect();
    inspection.ttl();
    inspection.marks_in_order();
    let Ok(restored) = native.splice(messages, PLACEHOLDER) else {
        return;
    };
    let old = native.field("messages").expect("it was spliced").get();
    assert_eq!(restored.len(), body.len() - old.len() + MESSAGES.len());
    let again = NativeBody::read(&restored).expect("the result is JSON");
    assert_eq!(
        again.field("messages").expect("it is still there").get(),
        MESSAGES
    );
    assert!(native.field_names().eq(again.field_names()));
    for name in native.field_names().filter(|name| *name != "messages") {
        let raw = |body: &NativeBody<'_>| body.field(name).map(|value| value.get().to_owned());
        assert_eq!(raw(&native), raw(&again));
    }
    // Back again: the old messages in the new body are the old body, byte for byte.
    let start = body
        .windows(old.len())
        .enumerate()
        .filter(|(_, window)| *window == old.as_bytes())
        .any(|(at, _)| {
            restored[..at] == body[..at]
                && restored[at..].starts_with(MESSAGES.as_bytes())
                && restored[at + MESSAGES.len()..] == body[at + old.len()..]
        });
    assert!(start);
});
