//! TLS 1.3 with certificates at both ends.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use kvferry_proto::handshake::Allowed;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, TrustAnchor, UnixTime,
};
use tokio_rustls::rustls::server::NoServerSessionStorage;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, CommonState, Error, InconsistentKeys, OtherError,
    PeerIncompatible, ServerConfig,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use webpki::{BorrowedCertRevocationList, KeyUsage, OwnedCertRevocationList};

use super::allow::{AllowList, AllowedPeer, FLEET};
use super::material::Material;
use super::stream::Peer;
use super::verify::{NotListed, Verifier, names};
use super::{SecureError, SecurityError};

/// What this kind of security is called.
pub(super) const KIND: &str = "TLS 1.3";
/// Both ends must mean this protocol, so that a certificate which serves something else too can't be made to serve this.
const PROTOCOL: &[u8] = b"kvferry-control";
/// Root certificates that are read, as a bound.
const MAX_ROOTS: usize = 256;

/// TLS 1.3 with certificates at both ends. Clones share what [`reload`](super::Security::reload) reads.
#[derive(Clone)]
pub struct TlsOptions(Arc<Shared>);

struct Shared {
    from: TlsBuilder,
    allow: AllowList,
    live: RwLock<Live>,
}

#[derive(Clone)]
struct Live {
    client: TlsConnector,
    server: TlsAcceptor,
}

/// What [`TlsOptions`] are made of.
#[derive(Clone, Debug)]
pub struct TlsBuilder {
    roots: Material,
    certificate: Material,
    key: Material,
    revoked: Option<Material>,
    allow: Vec<AllowedPeer>,
    exposed: bool,
}

impl TlsOptions {
    /// From PEM: the authorities whose certificates are accepted (those of the system are not), this engine's certificate followed
    /// by intermediate ones if there are any, and its private key (PKCS #8, PKCS #1 or SEC 1, not encrypted).
    ///
    /// Without [`allow`](TlsBuilder::allow), a peer is let in if its certificate has the DNS name [`FLEET`] and the id of its engine.
    #[must_use]
    pub fn builder(
        roots: impl Into<Material>,
        certificate: impl Into<Material>,
        key: impl Into<Material>,
    ) -> TlsBuilder {
        TlsBuilder {
            roots: roots.into(),
            certificate: certificate.into(),
            key: key.into(),
            revoked: None,
            allow: Vec::new(),
            exposed: false,
        }
    }

    pub(super) fn reload(&self) -> Result<(), SecurityError> {
        let live = self.0.from.load(&self.0.allow)?;
        *self.0.live.write().unwrap_or_else(PoisonError::into_inner) = live;
        Ok(())
    }

    fn live(&self) -> Live {
        self.0.live.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) async fn connect<S>(&self, stream: S) -> Result<(TlsStream<S>, Peer), SecureError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // Not sent and not compared: whose certificate it is says the allow-list.
        let name =
            ServerName::try_from(FLEET).map_err(|e| SecureError::Broken { ours: KIND, reason: e.to_string() })?;
        let stream = self.live().client.connect(name, stream).await.map_err(failure)?;
        let peer = self.peer(stream.get_ref().1)?;
        Ok((stream.into(), peer))
    }

    pub(super) async fn accept<S>(&self, stream: S) -> Result<(TlsStream<S>, Peer), SecureError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let stream = self.live().server.accept(stream).await.map_err(failure)?;
        let peer = self.peer(stream.get_ref().1)?;
        Ok((stream.into(), peer))
    }

    /// Who is at the other end of a link whose handshake is complete.
    fn peer(&self, session: &CommonState) -> Result<Peer, SecureError> {
        if session.alpn_protocol() != Some(PROTOCOL) {
            return Err(SecureError::OtherKind { ours: KIND, theirs: "TLS for another protocol" });
        }
        let names = session.peer_certificates().and_then(<[_]>::first).map(names).unwrap_or_default();
        match self.0.allow.admit(&names) {
            Some(engines) => Ok(Peer { names: Some(names.into()), engines: Some(Allowed::new(engines).into()) }),
            None => Err(SecureError::NotAllowed { names }),
        }
    }
}

impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.from.fmt(f)
    }
}

impl TlsBuilder {
    /// Adds whom to let in. With one entry or more, nobody else is.
    #[must_use]
    pub fn allow(mut self, peer: AllowedPeer) -> Self {
        self.allow.push(peer);
        self
    }

    /// Revocation lists in PEM. With them, a certificate of an authority that has no list among them is refused. A list whose next
    /// update is overdue still counts.
    #[must_use]
    pub fn revocation_lists(mut self, lists: impl Into<Material>) -> Self {
        self.revoked = Some(lists.into());
        self
    }

    /// Accepts a private key in a file that every user of this host may read.
    #[must_use]
    pub fn readable_by_others(mut self) -> Self {
        self.exposed = true;
        self
    }

    /// Reads and checks everything.
    ///
    /// # Errors
    /// If something can't be read or isn't valid, the key is not the certificate's, or no peer could accept our certificate today. A
    /// certificate of an authority that is not among our own roots is fine.
    pub fn build(self) -> Result<TlsOptions, SecurityError> {
        let allow = match self.allow.as_slice() {
            [] => AllowList::new(&[AllowedPeer::fleet(FLEET)])?,
            peers => AllowList::new(peers)?,
        };
        let live = RwLock::new(self.load(&allow)?);
        Ok(TlsOptions(Arc::new(Shared { from: self, allow, live })))
    }

    fn load(&self, allow: &AllowList) -> Result<Live, SecurityError> {
        let provider = Arc::new(default_provider());
        let verifier = Arc::new(Verifier {
            roots: self.roots()?,
            revoked: self.revoked()?,
            allow: allow.clone(),
            algorithms: provider.signature_verification_algorithms,
        });
        let chain = certificates(&self.certificate, "certificate")?;
        self.own(&verifier, &chain)?;
        let key = self.key()?;

        let error = |error: Error| self.refused(error);
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(error)?
            .dangerous()
            .with_custom_certificate_verifier(verifier.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(error)?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.enable_sni = false;
        // Each link is authenticated anew: a resumed session would outlive its certificate.
        client.resumption = Resumption::disabled();

        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(error)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(error)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Live { client: Arc::new(client).into(), server: Arc::new(server).into() })
    }

    fn roots(&self) -> Result<Vec<TrustAnchor<'static>>, SecurityError> {
        let what = "root certificate";
        let roots = certificates(&self.roots, what)?;
        if roots.len() > MAX_ROOTS {
            let reason =
                format!("it has {} certificates, more than {MAX_ROOTS}; give the fleet's own only", roots.len());
            return Err(SecurityError::Invalid { what, from: self.roots.to_string(), reason });
        }
        roots
            .iter()
            .map(|root| match webpki::anchor_from_trusted_cert(root) {
                Ok(anchor) => Ok(anchor.to_owned()),
                Err(e) => Err(SecurityError::Invalid { what, from: self.roots.to_string(), reason: e.to_string() }),
            })
            .collect()
    }

    fn revoked(&self) -> Result<Vec<webpki::CertRevocationList<'static>>, SecurityError> {
        let Some(from) = &self.revoked else { return Ok(Vec::new()) };
        let what = "revocation list";
        let bytes = from.read(what)?;
        let lists = sections::<CertificateRevocationListDer<'static>>(&bytes)
            .map_err(|reason| not_pem(what, from, reason, "-----BEGIN X509 CRL-----"))?;
        lists
            .iter()
            .map(|list| {
                BorrowedCertRevocationList::from_der(list)
                    .and_then(|list| list.to_owned())
                    .map(<OwnedCertRevocationList as Into<webpki::CertRevocationList<'static>>>::into)
                    .map_err(|e| SecurityError::Invalid { what, from: from.to_string(), reason: e.to_string() })
            })
            .collect()
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, SecurityError> {
        let what = "private key";
        let bytes = self.key.read_secret(what, self.exposed)?;
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| {
            let cure = "-----BEGIN PRIVATE KEY-----, and no passphrase (openssl pkey takes it off)";
            not_pem(what, &self.key, pem_reason(&error), cure)
        })
    }

    /// Refuses a certificate of ours that every peer would refuse.
    fn own(&self, verifier: &Verifier, chain: &[CertificateDer<'static>]) -> Result<(), SecurityError> {
        let bad = |reason: String| Err(SecurityError::Certificate { from: self.certificate.to_string(), reason });
        let Some((certificate, intermediates)) = chain.split_first() else {
            return bad("there is none".into());
        };
        for (usage, what) in [(KeyUsage::client_auth(), "clientAuth"), (KeyUsage::server_auth(), "serverAuth")] {
            match verifier.chain(certificate, intermediates, usage, UnixTime::now()) {
                Err(webpki::Error::CertExpired { time, not_after }) => {
                    return bad(certificate_reason(&CertificateError::ExpiredContext { time, not_after }));
                }
                Err(webpki::Error::CertNotValidYet { time, not_before }) => {
                    return bad(certificate_reason(&CertificateError::NotValidYetContext { time, not_before }));
                }
                Err(webpki::Error::RequiredEkuNotFoundContext(_)) => {
                    return bad(format!(
                        "its extended key usage lacks {what}, and an engine is both client and server"
                    ));
                }
                Err(webpki::Error::BadDer | webpki::Error::BadDerTime | webpki::Error::TrailingData(_)) => {
                    return bad("it is no X.509 certificate".into());
                }
                Err(webpki::Error::CaUsedAsEndEntity) => {
                    return bad("it is an authority's own certificate; the engine needs one issued by it".into());
                }
                // Whether it is accepted is for others to say: their roots may not be ours.
                _ => {}
            }
        }
        match names(certificate).is_empty() {
            true => bad("it has no DNS and no URI name (subjectAltName), which is what peers go by".into()),
            false => Ok(()),
        }
    }

    fn refused(&self, error: Error) -> SecurityError {
        match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                SecurityError::KeyMismatch { certificate: self.certificate.to_string(), key: self.key.to_string() }
            }
            Error::General(reason) => {
                SecurityError::Invalid { what: "private key", from: self.key.to_string(), reason }
            }
            other => SecurityError::Library { library: "rustls", reason: other.to_string() },
        }
    }
}

fn certificates(from: &Material, what: &'static str) -> Result<Vec<CertificateDer<'static>>, SecurityError> {
    sections(&from.read(what)?).map_err(|reason| not_pem(what, from, reason, "-----BEGIN CERTIFICATE-----"))
}

/// All sections of a kind; none is an error.
fn sections<T: PemObject>(bytes: &[u8]) -> Result<Vec<T>, &'static str> {
    let all: Result<Vec<T>, _> = T::pem_slice_iter(bytes).collect();
    match all {
        Ok(all) if all.is_empty() => Err(pem_reason(&pem::Error::NoItemsFound)),
        Ok(all) => Ok(all),
        Err(error) => Err(pem_reason(&error)),
    }
}

/// The library's own texts show the line, which may be of a key.
fn pem_reason(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::NoItemsFound => "no such section",
        pem::Error::MissingSectionEnd { .. } => "a section without its end: is the file cut off?",
        pem::Error::IllegalSectionStart { .. } => "a section begins with a malformed line",
        pem::Error::Base64Decode(_) => "a section that is not base64",
        _ => "it can't be read as PEM",
    }
}

fn not_pem(what: &'static str, from: &Material, reason: &'static str, cure: &'static str) -> SecurityError {
    SecurityError::NotPem { what, from: from.to_string(), reason: reason.into(), cure }
}

/// What went wrong, told as what to change. Also of a link whose handshake was complete: a client learns only from the first bytes
/// that it reads whether its certificate was accepted.
pub(super) fn failure(error: io::Error) -> SecureError {
    let Some(error) = error.get_ref().and_then(|e| e.downcast_ref::<Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                SecureError::Closed { ours: KIND }
            }
            _ => SecureError::Io(error),
        };
    };
    match error {
        Error::AlertReceived(alert) => alarmed(*alert),
        Error::InvalidMessage(_) => SecureError::OtherKind { ours: KIND, theirs: "something that isn't TLS" },
        Error::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired) => {
            SecureError::OtherKind { ours: KIND, theirs: "another version of TLS" }
        }
        Error::NoCertificatesPresented => {
            SecureError::Certificate { reason: "it sent none; both ends need one (TlsOptions of the other end)".into() }
        }
        Error::InvalidCertificate(CertificateError::Other(OtherError(inner))) => {
            match inner.downcast_ref::<NotListed>() {
                Some(NotListed(names)) => SecureError::NotAllowed { names: names.clone() },
                None => SecureError::Certificate { reason: inner.to_string() },
            }
        }
        Error::InvalidCertificate(error) => SecureError::Certificate { reason: certificate_reason(error) },
        other => SecureError::Broken { ours: KIND, reason: other.to_string() },
    }
}

fn alarmed(alert: AlertDescription) -> SecureError {
    use AlertDescription as A;
    let cure = match alert {
        A::UnknownCA => "its roots lack the authority that issued it; add it there",
        A::CertificateExpired => "it has expired, or a clock is wrong",
        A::CertificateRevoked => "it is on a revocation list there",
        A::CertificateUnknown => {
            "perhaps the allow-list there has no entry for its names, or no revocation list its authority"
        }
        A::CertificateRequired => "it got none",
        A::BadCertificate | A::UnsupportedCertificate | A::AccessDenied | A::DecryptError => "its log says why",
        A::NoApplicationProtocol => {
            return SecureError::OtherKind { ours: KIND, theirs: "TLS for another protocol" };
        }
        A::ProtocolVersion => return SecureError::OtherKind { ours: KIND, theirs: "another version of TLS" },
        other => return SecureError::Broken { ours: KIND, reason: format!("it sent the alert {other:?}") },
    };
    SecureError::Refused { alert: format!("{alert:?}"), cure }
}

fn certificate_reason(error: &CertificateError) -> String {
    match error {
        CertificateError::ExpiredContext { time, not_after } => format!(
            "it expired {} s ago (notAfter {}, and here it is {}, in seconds since 1970)",
            time.as_secs().saturating_sub(not_after.as_secs()),
            not_after.as_secs(),
            time.as_secs()
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "it is valid only in {} s (notBefore {}, and here it is {}, in seconds since 1970); are both clocks right?",
            not_before.as_secs().saturating_sub(time.as_secs()),
            not_before.as_secs(),
            time.as_secs()
        ),
        CertificateError::UnknownIssuer => {
            "none of our roots issued it; add its authority to the roots, or its intermediate certificates to its file"
                .into()
        }
        CertificateError::Revoked => "its authority has revoked it".into(),
        CertificateError::InvalidPurpose => {
            "its extended key usage lacks clientAuth or serverAuth, and an engine is both".into()
        }
        CertificateError::UnknownRevocationStatus => {
            "no revocation list of its authority was given; add it to the revocation lists".into()
        }
        other => other.to_string(),
    }
}
