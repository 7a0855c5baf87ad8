//! `kv_transfer_params`: how routers and proxies carry a [`Reference`] from a prefill engine's response to a decode request.
//!
//! Proxies made for other connectors put an object of this name into the request to the prefill engine, take the one in its
//! response, and put that into the request to the decode engine, as it is. They look at two booleans, which here mean what they
//! mean everywhere; the reference is one more key, with a text that nobody but kvferry reads:
//!
//! ```text
//! router -> P    {"do_remote_decode": true, "do_remote_prefill": false}
//! P -> router    {"do_remote_decode": false, "do_remote_prefill": true, "kvferry_reference": "kvferry1...."}
//! router -> D    the same
//! ```
//!
//! A router that wants the bytes pushed, or pulled, whatever the engines usually do, says `"kvferry_mode": "push"` or `"pull"`, too; the
//! prefill engine copies it into its answer.
//!
//! Keys that are not known are ignored, and `null` is as good as nothing: proxies send both. A decode request whose reference
//! was lost on the way is a value, [`Source::Lost`], not an error: the engine computes the prompt itself. What is there but makes
//! no sense is an error that names the key.
//!
//! It holds no block ids, host or port: a router need not know them, and an engine with another connector can't take our
//! parameters for its own.

use std::fmt;
use std::str::FromStr;

use kvferry_session::Mode;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::reference::{Reference, ReferenceError};

/// The key of the reference.
pub const REFERENCE_KEY: &str = "kvferry_reference";
/// The key of who shall move the bytes.
pub const MODE_KEY: &str = "kvferry_mode";
const PREFILL_KEY: &str = "do_remote_prefill";
const DECODE_KEY: &str = "do_remote_decode";

/// The longest text that is read, in bytes: other connectors' parameters list a request's blocks.
const MAX_TEXT: usize = 1 << 20;
/// The longest reference that is read, in bytes.
const MAX_REFERENCE: usize = 4096;

/// The `kv_transfer_params` of one request or response.
///
/// ```
/// # use kvferry::{Source, TransferParams};
/// // What a proxy sends to a prefill engine:
/// let asked: TransferParams = r#"{"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null}"#.parse()?;
/// assert!(asked.wants_offer());
/// assert_eq!(asked.source(), Source::None);
/// # Ok::<(), kvferry::ParamsError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TransferParams {
    remote_prefill: Option<bool>,
    remote_decode: Option<bool>,
    reference: Option<Reference>,
    mode: Option<Mode>,
}

/// Where the cache of a request is to come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source<'a> {
    /// From nowhere: the engine computes the prompt.
    None,
    /// It was computed elsewhere, but the reference did not arrive. The engine computes the prompt, and should warn.
    Lost,
    /// It is to be pulled.
    At(&'a Reference),
}

/// `kv_transfer_params` that make no sense.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// Longer than is read.
    #[error("kv_transfer_params has {got} bytes, more than the {limit} that are read")]
    TooLong {
        /// Its length in bytes.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// Not JSON, or a known key twice.
    #[error("kv_transfer_params is no JSON object: {0}")]
    Json(String),
    /// A key has a value of another type.
    #[error("kv_transfer_params{}{key} must be {expected}, not {got}", if .key.is_empty() { "" } else { ": " })]
    WrongType {
        /// The key; empty for the object as a whole.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        got: &'static str,
    },
    /// The reference is too long.
    #[error(
        "kv_transfer_params: {REFERENCE_KEY} has {got} bytes, more than the {MAX_REFERENCE} that a reference can have"
    )]
    LongReference {
        /// Its length in bytes.
        got: usize,
    },
    /// The reference is none.
    #[error("kv_transfer_params: {REFERENCE_KEY}: {0}")]
    Reference(#[from] ReferenceError),
}

impl TransferParams {
    /// What a router sends to the prefill engine: compute the prompt, then offer its blocks.
    #[must_use]
    pub fn for_prefill() -> Self {
        Self { remote_prefill: Some(false), remote_decode: Some(true), ..Self::default() }
    }

    /// What the prefill engine answers, and the router sends to the decode engine: pull this.
    #[must_use]
    pub fn of(reference: Reference) -> Self {
        Self { remote_prefill: Some(true), remote_decode: Some(false), reference: Some(reference), mode: None }
    }

    /// What a router sends to a prefill engine in a later turn: pull what the decode engine has offered, compute the rest of the
    /// prompt, then offer all.
    #[must_use]
    pub fn for_next_turn(reference: Reference) -> Self {
        Self { remote_prefill: Some(false), remote_decode: Some(true), reference: Some(reference), mode: None }
    }

    /// Says who shall move the bytes. A router says so to the prefill engine, which should answer with the same: then it is with the
    /// reference when that reaches the decode engine.
    #[must_use]
    pub fn with_mode(mut self, mode: Option<Mode>) -> Self {
        self.mode = mode;
        self
    }

    /// Who shall move the bytes, if somebody has said so: for [`PullSpec::mode`](crate::PullSpec::mode).
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Reads a JSON value that has been parsed already.
    ///
    /// # Errors
    /// If it is no object, or a known key has a value that makes no sense.
    pub fn from_value(value: &Value) -> Result<Self, ParamsError> {
        let object = match value {
            Value::Null => return Ok(Self::default()),
            Value::Object(object) => object,
            other => return Err(wrong("", "an object", &Kind::of(other))),
        };
        let kind = |key: &str| object.get(key).map(Kind::of);
        Self::try_from(Keys {
            do_remote_prefill: kind(PREFILL_KEY),
            do_remote_decode: kind(DECODE_KEY),
            kvferry_reference: kind(REFERENCE_KEY),
            kvferry_mode: kind(MODE_KEY),
        })
    }

    /// As a JSON object.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let flag = |key: &str, value: Option<bool>| value.map(|v| (key.to_owned(), Value::Bool(v)));
        let reference = self.reference.as_ref().map(|r| (REFERENCE_KEY.to_owned(), Value::String(r.to_string())));
        let mode = self.mode.map(|mode| (MODE_KEY.to_owned(), Value::String(word(mode).to_owned())));
        let keys = [flag(DECODE_KEY, self.remote_decode), flag(PREFILL_KEY, self.remote_prefill), reference, mode];
        Value::Object(keys.into_iter().flatten().collect())
    }

    /// Whether the engine is to offer the request's blocks once they are computed.
    #[must_use]
    pub fn wants_offer(&self) -> bool {
        self.remote_decode == Some(true)
    }

    /// Where the request's cache is to come from. A reference counts unless both booleans say that nothing is remote; a lost
    /// `do_remote_prefill` does not lose it.
    #[must_use]
    pub fn source(&self) -> Source<'_> {
        let declined = self.remote_prefill == Some(false) && !self.wants_offer();
        match &self.reference {
            Some(reference) if !declined => Source::At(reference),
            None if self.remote_prefill == Some(true) => Source::Lost,
            _ => Source::None,
        }
    }
}

impl FromStr for TransferParams {
    type Err = ParamsError;

    fn from_str(text: &str) -> Result<Self, ParamsError> {
        if text.len() > MAX_TEXT {
            return Err(ParamsError::TooLong { got: text.len(), limit: MAX_TEXT });
        }
        let keys: Option<Keys> = serde_json::from_str(text).map_err(|e| ParamsError::Json(e.to_string()))?;
        keys.map_or_else(|| Ok(Self::default()), Self::try_from)
    }
}

impl TryFrom<Keys> for TransferParams {
    type Error = ParamsError;

    fn try_from(keys: Keys) -> Result<Self, ParamsError> {
        let reference = match keys.kvferry_reference {
            None | Some(Kind::Null) => None,
            Some(Kind::Text(text)) if text.len() > MAX_REFERENCE => {
                return Err(ParamsError::LongReference { got: text.len() });
            }
            Some(Kind::Text(text)) => Some(text.parse()?),
            Some(other) => return Err(wrong(REFERENCE_KEY, "a string", &other)),
        };
        let remote_prefill = flag(PREFILL_KEY, keys.do_remote_prefill)?;
        let remote_decode = flag(DECODE_KEY, keys.do_remote_decode)?;
        let mode = match keys.kvferry_mode {
            None | Some(Kind::Null) => None,
            Some(Kind::Text(text)) if text == word(PUSH) => Some(PUSH),
            Some(Kind::Text(text)) if text == word(Mode::Pull) => Some(Mode::Pull),
            Some(other) => return Err(wrong(MODE_KEY, "\"pull\" or \"push\"", &other)),
        };
        Ok(Self { remote_prefill, remote_decode, reference, mode })
    }
}

impl fmt::Display for TransferParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_value().fmt(f)
    }
}

/// As a field of an engine's own request or response.
impl Serialize for TransferParams {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_value().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TransferParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let keys = Option::<Keys>::deserialize(deserializer)?;
        keys.map_or_else(|| Ok(Self::default()), Self::try_from).map_err(serde::de::Error::custom)
    }
}

/// The known keys; others are skipped without being kept.
#[derive(Deserialize)]
struct Keys {
    do_remote_prefill: Option<Kind>,
    do_remote_decode: Option<Kind>,
    kvferry_reference: Option<Kind>,
    kvferry_mode: Option<Kind>,
}

/// A value, as far as it matters: what is inside a list or an object is skipped, however deep.
enum Kind {
    Null,
    Bool(bool),
    Number,
    Text(String),
    List,
    Object,
}

impl Kind {
    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(b) => Self::Bool(*b),
            Value::Number(_) => Self::Number,
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(_) => Self::List,
            Value::Object(_) => Self::Object,
        }
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KindVisitor)
    }
}

struct KindVisitor;

impl<'de> Visitor<'de> for KindVisitor {
    type Value = Kind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Kind, E> {
        Ok(Kind::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Kind, E> {
        Ok(Kind::Bool(value))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Kind, E> {
        Ok(Kind::Number)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Kind, E> {
        Ok(Kind::Number)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Kind, E> {
        Ok(Kind::Number)
    }

    fn visit_str<E>(self, text: &str) -> Result<Kind, E> {
        Ok(Kind::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Kind, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Kind::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Kind, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Kind::Object)
    }
}

const PUSH: Mode = Mode::Push { progress: false };

/// As it is written.
const fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Pull => "pull",
        Mode::Push { .. } => "push",
    }
}

fn flag(key: &'static str, value: Option<Kind>) -> Result<Option<bool>, ParamsError> {
    match value {
        None | Some(Kind::Null) => Ok(None),
        Some(Kind::Bool(flag)) => Ok(Some(flag)),
        Some(other) => Err(wrong(key, "true or false", &other)),
    }
}

fn wrong(key: &'static str, expected: &'static str, got: &Kind) -> ParamsError {
    let got = match got {
        Kind::Null => "null",
        Kind::Bool(_) => "a boolean",
        Kind::Number => "a number",
        Kind::Text(_) if key == MODE_KEY => "another string",
        Kind::Text(_) => "a string",
        Kind::List => "a list",
        Kind::Object => "an object",
    };
    ParamsError::WrongType { key, expected, got }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const REFERENCE: &str =
        "kvferry1.000102030405060708090a0b0c0d0e0f.00000000000000000000000000000007.prefill-0@tcp:10.0.0.1:7000";

    fn reference() -> Reference {
        REFERENCE.parse().unwrap()
    }

    fn parse(value: &Value) -> Result<TransferParams, ParamsError> {
        let by_text = value.to_string().parse::<TransferParams>();
        assert_eq!(by_text, TransferParams::from_value(value), "{value}");
        by_text
    }

    #[test]
    fn the_objects_are_as_documented() {
        let p = TransferParams::for_prefill();
        assert_eq!(p.to_string(), r#"{"do_remote_decode":true,"do_remote_prefill":false}"#);
        let d = TransferParams::of(reference());
        let text =
            format!(r#"{{"do_remote_decode":false,"do_remote_prefill":true,"kvferry_reference":"{REFERENCE}"}}"#);
        assert_eq!(d.to_string(), text);
        for params in [p, d, TransferParams::for_next_turn(reference()), TransferParams::default()] {
            assert_eq!(parse(&params.to_value()).unwrap(), params);
            assert_eq!(serde_json::from_value::<TransferParams>(json!(params)).unwrap(), params);
        }
    }

    #[test]
    fn a_router_may_say_who_moves_the_bytes() {
        for mode in [None, Some(Mode::Pull), Some(PUSH)] {
            let asked = parse(&TransferParams::for_prefill().with_mode(mode).to_value()).unwrap();
            let answered = parse(&TransferParams::of(reference()).with_mode(asked.mode()).to_value()).unwrap();
            assert_eq!((asked.mode(), answered.mode()), (mode, mode));
        }
        assert_eq!(parse(&json!({"kvferry_mode": null})).unwrap().mode(), None);
        assert!(TransferParams::for_prefill().with_mode(Some(PUSH)).to_string().contains(r#""kvferry_mode":"push""#));
        for bad in [json!("pushed"), json!(true), json!(["push"])] {
            let error = parse(&json!({"kvferry_mode": bad})).unwrap_err().to_string();
            assert!(error.contains("kvferry_mode must be \"pull\" or \"push\", not "), "{error}");
        }
    }

    /// What proxies do: an object with nulls to P; P's object copied whole, alone or over the one sent before, booleans set
    /// again, keys of their own added.
    #[test]
    fn the_reference_survives_a_proxy() {
        let sent = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null,
        });
        let at_p = parse(&sent).unwrap();
        assert!(at_p.wants_offer());
        assert_eq!(at_p.source(), Source::None);

        let answer = TransferParams::of(reference()).to_value();
        let mut over = sent.clone();
        over.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
        let mut marked = answer.clone();
        marked["do_remote_prefill"] = json!(true);
        marked["remote_host"] = json!("10.0.0.1");
        marked["remote_port"] = json!(5600);
        marked["remote_block_ids"] = json!([[1, 2, 3], [4]]);
        marked["tp_size"] = json!("2");
        for copied in [answer, over, marked] {
            let at_d = parse(&copied).unwrap();
            assert!(!at_d.wants_offer(), "{copied}");
            assert_eq!(at_d.source(), Source::At(&reference()), "{copied}");
        }
    }

    /// A missing reference is no remote prefill: typed, no crash.
    #[test]
    fn id_01_a_lost_reference_is_no_remote_prefill() {
        for lost in [
            json!({"do_remote_prefill": true, "do_remote_decode": false}),
            json!({"do_remote_prefill": true, "kvferry_reference": null}),
            json!({"do_remote_prefill": true, "remote_engine_id": "E1", "remote_request_id": "req-1-aaaaaaaa"}),
        ] {
            assert_eq!(parse(&lost).unwrap().source(), Source::Lost, "{lost}");
        }
        for none in [json!({}), json!(null), json!({"do_remote_prefill": null}), json!({"do_remote_decode": true})] {
            assert_eq!(parse(&none).unwrap().source(), Source::None, "{none}");
        }
    }

    #[test]
    fn a_reference_counts_unless_both_booleans_say_no() {
        let source = |prefill: Value, decode: Value| {
            let params =
                json!({"do_remote_prefill": prefill, "do_remote_decode": decode, "kvferry_reference": REFERENCE});
            let params = parse(&params).unwrap();
            (matches!(params.source(), Source::At(_)), params.wants_offer())
        };
        assert_eq!(source(json!(null), json!(null)), (true, false));
        assert_eq!(source(json!(true), json!(false)), (true, false));
        assert_eq!(source(json!(false), json!(true)), (true, true));
        assert_eq!(source(json!(false), json!(false)), (false, false));
        assert_eq!(source(json!(false), json!(null)), (false, false));
    }

    #[test]
    fn what_makes_no_sense_is_an_error_that_names_the_key() {
        let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
        for (key, value) in [
            ("do_remote_prefill", json!("true")),
            ("do_remote_prefill", json!(1)),
            ("do_remote_decode", json!([true])),
            ("do_remote_decode", deep.clone()),
            ("kvferry_reference", json!(7)),
            ("kvferry_reference", json!({"reference": REFERENCE})),
            ("kvferry_reference", json!("")),
            ("kvferry_reference", json!("kvferry1.short")),
            ("kvferry_reference", json!(format!("{REFERENCE}{}", "9".repeat(5000)))),
            ("kvferry_reference", deep),
        ] {
            let error = parse(&json!({key: value})).unwrap_err().to_string();
            assert!(error.contains(key) && error.len() < 1000, "{error}");
        }
        for other in [json!([]), json!("x"), json!(3), json!(true)] {
            assert!(other.to_string().parse::<TransferParams>().is_err(), "{other}");
            assert!(TransferParams::from_value(&other).is_err(), "{other}");
        }
    }

    #[test]
    fn texts_that_are_no_json_are_errors() {
        let twice = r#"{"do_remote_prefill": true, "do_remote_prefill": false}"#;
        for bad in ["", "{", "{]", "nul", "{\"do_remote_prefill\": tru", "\u{0}", twice] {
            assert!(matches!(bad.parse::<TransferParams>(), Err(ParamsError::Json(_))), "{bad:.40}");
        }
        // However deep: what is not known is skipped, what is known is not looked into.
        let nest = |key: &str| format!("{{\"{key}\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(nest("x").parse(), Ok(TransferParams::default()));
        let error = nest(REFERENCE_KEY).parse::<TransferParams>().unwrap_err().to_string();
        assert!(error.contains("kvferry_reference must be a string, not a list"), "{error}");
        let long = format!("{{\"x\": \"{}\"}}", "a".repeat(MAX_TEXT));
        assert!(matches!(long.parse::<TransferParams>(), Err(ParamsError::TooLong { .. })));
    }

    #[test]
    fn it_is_a_field_of_an_engines_own_request() {
        #[derive(Deserialize)]
        struct Request {
            #[serde(default)]
            kv_transfer_params: TransferParams,
        }
        let read = |text: &str| serde_json::from_str::<Request>(text).map(|r| r.kv_transfer_params);
        assert_eq!(read(r#"{"prompt": "x"}"#).unwrap(), TransferParams::default());
        assert_eq!(read(r#"{"kv_transfer_params": null}"#).unwrap(), TransferParams::default());
        assert!(read(r#"{"kv_transfer_params": {"do_remote_decode": true}}"#).unwrap().wants_offer());
        let error = read(r#"{"kv_transfer_params": {"do_remote_decode": 5}}"#).err().unwrap();
        assert!(error.to_string().contains("do_remote_decode must be true or false, not a number"), "{error}");
    }
}
