//! Who may talk to us, and as which engine.

use std::fmt;
use std::sync::Arc;

use super::SecurityError;

/// The name that every certificate of a fleet has, unless an allow-list says otherwise.
pub const FLEET: &str = "kvferry";

/// An entry of an allow-list: a name that a peer must prove, and the engine ids that it may then claim.
///
/// A name is a DNS or URI name of the peer's certificate (exactly as it stands there), or the id of a shared key. A `*` at the
/// end stands for any rest: `spiffe://cluster.local/ns/kv/*`. Where several entries match a peer, it may claim what any of them says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllowedPeer {
    name: String,
    claims: Claims<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Claims<P> {
    /// The names that matched.
    Matched,
    /// All proven names but those that matched.
    Others,
    /// These engine ids.
    These(Vec<P>),
}

impl AllowedPeer {
    /// A peer that proves this name, and is the engine of the same id: with `prefill-*` a peer that proves `prefill-3` is the engine
    /// `prefill-3`.
    #[must_use]
    pub fn name(name: impl Into<String>) -> Self {
        Self { name: name.into(), claims: Claims::Matched }
    }

    /// A peer whose certificate has this name, which all of a fleet have, and besides it the engine's id. An entry with [`FLEET`] is
    /// the whole allow-list of TLS unless another is given.
    #[must_use]
    pub fn fleet(name: impl Into<String>) -> Self {
        Self { name: name.into(), claims: Claims::Others }
    }

    /// Binds the name to engine ids; a `*` at the end of one stands for any rest, and alone for any engine.
    #[must_use]
    pub fn engines<I: Into<String>>(mut self, engines: impl IntoIterator<Item = I>) -> Self {
        self.claims = Claims::These(engines.into_iter().map(Into::into).collect());
        self
    }
}

/// A text that must be equal, or the beginning of one.
#[derive(Clone, PartialEq, Eq)]
struct Pattern {
    text: String,
    prefix: bool,
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, SecurityError> {
        let (rest, prefix) = match text.strip_suffix('*') {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        if text.is_empty() || rest.contains('*') || !rest.chars().all(|c| c.is_ascii_graphic()) {
            return Err(SecurityError::Pattern { pattern: text.into() });
        }
        Ok(Self { text: rest.into(), prefix })
    }

    fn matches(&self, name: &str) -> bool {
        if self.prefix { name.starts_with(&self.text) } else { name == self.text }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.text, if self.prefix { "*" } else { "" })
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// A checked allow-list.
#[derive(Clone, Debug)]
pub(super) struct AllowList(Arc<[(Pattern, Claims<Pattern>)]>);

impl AllowList {
    pub(super) fn new(peers: &[AllowedPeer]) -> Result<Self, SecurityError> {
        let entry = |peer: &AllowedPeer| {
            let claims = match &peer.claims {
                Claims::Matched => Claims::Matched,
                Claims::Others => Claims::Others,
                Claims::These(engines) if engines.is_empty() => {
                    return Err(SecurityError::NoEngines { name: peer.name.clone() });
                }
                Claims::These(engines) => {
                    Claims::These(engines.iter().map(|e| Pattern::parse(e)).collect::<Result<_, _>>()?)
                }
            };
            Ok((Pattern::parse(&peer.name)?, claims))
        };
        peers.iter().map(entry).collect::<Result<_, _>>().map(Self)
    }

    /// The engine ids that a peer who proves these names may claim, as [`Allowed`](kvferry_proto::handshake::Allowed) reads them; `None` if no entry matches.
    pub(super) fn admit(&self, names: &[String]) -> Option<Vec<String>> {
        let mut engines = Vec::new();
        let mut admitted = false;
        for (pattern, claims) in self.0.iter() {
            if !names.iter().any(|name| pattern.matches(name)) {
                continue;
            }
            admitted = true;
            match claims {
                Claims::Matched => engines.extend(names.iter().filter(|n| pattern.matches(n)).cloned()),
                Claims::Others => engines.extend(names.iter().filter(|n| !pattern.matches(n)).cloned()),
                Claims::These(these) => engines.extend(these.iter().map(Pattern::to_string)),
            }
        }
        engines.sort_unstable();
        engines.dedup();
        admitted.then_some(engines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&n| n.to_owned()).collect()
    }

    #[test]
    fn sec_an_entry_binds_names_to_engines() {
        let allow = AllowList::new(&[
            AllowedPeer::fleet("kvferry"),
            AllowedPeer::name("spiffe://a/engine/*"),
            AllowedPeer::name("decoders").engines(["decode-*", "spare"]),
        ])
        .unwrap();
        for (proven, engines) in [
            (&["kvferry", "prefill-0"][..], Some(&["prefill-0"][..])),
            (&["kvferry"], Some(&[])),
            (&["prefill-0"], None),
            (&["KVFERRY", "kvferry2"], None),
            (&["spiffe://a/engine/p", "spiffe://b/engine/q"], Some(&["spiffe://a/engine/p"])),
            (&["decoders"], Some(&["decode-*", "spare"])),
            (&["decoders", "kvferry"], Some(&["decode-*", "decoders", "spare"])),
            (&[], None),
        ] {
            assert_eq!(allow.admit(&names(proven)), engines.map(names), "{proven:?}");
        }
    }

    #[test]
    fn sec_a_pattern_that_would_mean_something_else_is_refused() {
        for pattern in ["", "*.example", "a*b", "a**", "a b", "\u{e9}"] {
            let allow = AllowList::new(&[AllowedPeer::name(pattern)]);
            assert!(matches!(allow, Err(SecurityError::Pattern { .. })), "{pattern:?}");
            let allow = AllowList::new(&[AllowedPeer::name("x").engines([pattern])]);
            assert!(matches!(allow, Err(SecurityError::Pattern { .. })), "{pattern:?}");
        }
        let nobody = AllowedPeer::name("x").engines(Vec::<String>::new());
        assert!(matches!(AllowList::new(&[nobody]), Err(SecurityError::NoEngines { .. })));
    }
}
