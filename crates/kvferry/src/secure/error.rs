//! Why a [`Security`](super::Security) can't be made, and why a link can't be secured.

use std::io;

/// A [`Security`](super::Security) can't be made, or read again. No text of it has a secret in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// A file that can't be read.
    #[error("{what} can't be read from {from}: {error}; check the path, and that this process's user may read it")]
    Unreadable {
        /// What was wanted.
        what: &'static str,
        /// Where from.
        from: String,
        /// Why not.
        error: io::Error,
    },
    /// A secret that every user of this host may read.
    #[error(
        "{what} in {from} may be read or written by every user of this host (mode {mode:03o}); chmod o-rwx it (Kubernetes: \
         defaultMode: 0440), or say readable_by_others() if only trusted users see that file system"
    )]
    Exposed {
        /// What it is.
        what: &'static str,
        /// Where it is.
        from: String,
        /// The file's permission bits.
        mode: u32,
    },
    /// More bytes than such a thing has.
    #[error("{what} in {from} is longer than {limit} bytes; is it the right file?")]
    TooLong {
        /// What was wanted.
        what: &'static str,
        /// Where from.
        from: String,
        /// The limit.
        limit: u64,
    },
    /// No PEM, or not of that kind.
    #[error("{from} has no {what} in PEM ({reason}); it must have {cure}")]
    NotPem {
        /// What was wanted.
        what: &'static str,
        /// Where from.
        from: String,
        /// What was found.
        reason: String,
        /// What it should begin with.
        cure: &'static str,
    },
    /// PEM with something inside that isn't valid.
    #[error("{what} in {from} is not valid: {reason}")]
    Invalid {
        /// What it is.
        what: &'static str,
        /// Where it is.
        from: String,
        /// Why not.
        reason: String,
    },
    /// Our own certificate would be refused by every peer today.
    #[error("our certificate in {from} can't be used: {reason}; issue a new one")]
    Certificate {
        /// Where it is.
        from: String,
        /// Why not.
        reason: String,
    },
    /// The private key is not that of the certificate.
    #[error(
        "the private key in {key} is not the one of the certificate in {certificate}; give the two that were issued together"
    )]
    KeyMismatch {
        /// Where the certificate is.
        certificate: String,
        /// Where the key is.
        key: String,
    },
    /// A pattern of an allow-list.
    #[error("{pattern:?} is no name for an allow-list: use printable ASCII without blanks, and a * at the end only")]
    Pattern {
        /// The text.
        pattern: String,
    },
    /// An entry of an allow-list under which no engine may speak.
    #[error("the allow-list's entry {name:?} names no engine; name some, or use \"*\" for any")]
    NoEngines {
        /// The entry.
        name: String,
    },
    /// A shared key of the wrong length.
    #[error(
        "the shared key {id:?} in {from} is none of 32 bytes, 64 hex digits or 44 base64 characters; make one with: openssl rand -hex 32"
    )]
    KeyLength {
        /// The key's id.
        id: String,
        /// Where it is.
        from: String,
    },
    /// A shared key that isn't random.
    #[error("the shared key {id:?} in {from} is not random ({reason}); make one with: openssl rand -hex 32")]
    WeakKey {
        /// The key's id.
        id: String,
        /// Where it is.
        from: String,
        /// How that shows.
        reason: &'static str,
    },
    /// A key id that isn't one.
    #[error("{id:?} is no id for a shared key: use 1 to {limit} letters, digits and . _ : / -", limit = super::MAX_KEY_ID)]
    KeyId {
        /// The text.
        id: String,
    },
    /// Two keys of one id.
    #[error("two shared keys have the id {id:?}; the id is how the other end knows which key is meant")]
    SameKeyId {
        /// The id.
        id: String,
    },
    /// A library refused for a reason that should not occur.
    #[error("the {library} library refused: {reason}")]
    Library {
        /// Which.
        library: &'static str,
        /// Its reason.
        reason: String,
    },
}

/// A link can't be secured, or failed after it was. Texts of peers are shortened; no secret is in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecureError {
    /// The socket.
    #[error("the connection failed in the handshake: {0}")]
    Io(#[from] io::Error),
    /// The other end closed it.
    #[error(
        "the other end closed the connection in the handshake; it may be configured for another security than {ours}, not know \
         us, or refuse more connections: its log says"
    )]
    Closed {
        /// Our kind of security.
        ours: &'static str,
    },
    /// The other end speaks something else.
    #[error("the other end speaks {theirs}, and this end is configured for {ours}; give both ends the same security")]
    OtherKind {
        /// Our kind of security.
        ours: &'static str,
        /// What it seems to speak.
        theirs: &'static str,
    },
    /// It is of our kind, and breaks its rules.
    #[error("the other end breaks the rules of {ours}: {reason}")]
    Broken {
        /// Our kind of security.
        ours: &'static str,
        /// How.
        reason: String,
    },
    /// The other end's certificate can't be accepted.
    #[error("the other end's certificate is refused: {reason}")]
    Certificate {
        /// Why, and what to change.
        reason: String,
    },
    /// The other end doesn't accept ours.
    #[error("the other end refuses our certificate ({alert}): {cure}")]
    Refused {
        /// The TLS alert that it sent.
        alert: String,
        /// What to look at.
        cure: &'static str,
    },
    /// Authenticated, and not on our allow-list.
    #[error("the other end proves {}, and the allow-list has no entry for it; add one, or issue a certificate that matches", list(.names))]
    NotAllowed {
        /// What it proves.
        names: Vec<String>,
    },
    /// Authenticated, and another than the one we meant to reach.
    #[error("the other end should be {expected:?}, and proves {}; is the address right?", list(.names))]
    OtherPeer {
        /// The name expected.
        expected: String,
        /// What it proves.
        names: Vec<String>,
    },
    /// A client's key id that we don't have.
    #[error("the client speaks with the shared key {id:?}, which this end doesn't have (it has {}); add it here before clients use it", list(.known))]
    UnknownKey {
        /// The client's key id.
        id: String,
        /// Ours.
        known: Vec<String>,
    },
    /// The server doesn't have our key id.
    #[error("the server says that it doesn't have the shared key {id:?}; add it there before clients use it")]
    KeyNotKnownThere {
        /// Our key id.
        id: String,
    },
    /// The same key id, another key; or tampered with on the way.
    #[error(
        "the shared keys of the id {id:?} are not the same at both ends (or the handshake was tampered with); compare their files"
    )]
    WrongKey {
        /// The key's id.
        id: String,
    },
}

/// At most eight names, quoted.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    if names.is_empty() {
        return "no name".into();
    }
    let mut text = names.iter().take(SHOWN).map(|n| format!("{n:?}")).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text += &format!(" and {} more", names.len() - SHOWN);
    }
    text
}
