//! Whether a certificate is one of our fleet's: for clients and servers by the same rule.
//!
//! Chains, dates, purposes, name constraints and revocation are checked by `rustls-webpki`, signatures by `rustls`. What is decided
//! here is which of a valid certificate's names let its owner in. They are compared letter by letter: a name with a wildcard proves
//! nothing.

use std::fmt;
use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, TrustAnchor, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};
use webpki::{CertRevocationList, EndEntityCert, KeyUsage, RevocationOptionsBuilder};

use super::allow::AllowList;

/// Names of a certificate that are looked at, and the bytes of one. Others are passed over.
const MAX_NAMES: usize = 64;
const MAX_NAME: usize = 1024;

/// The rule.
pub(super) struct Verifier {
    pub(super) roots: Vec<TrustAnchor<'static>>,
    pub(super) revoked: Vec<CertRevocationList<'static>>,
    pub(super) allow: AllowList,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
}

/// A valid certificate whose names are on no list.
#[derive(Debug, thiserror::Error)]
#[error("the certificate's names are not on the allow-list")]
pub(super) struct NotListed(pub(super) Vec<String>);

impl Verifier {
    /// Whether the chain leads to one of the roots and is in date, for this purpose.
    pub(super) fn chain(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
        now: UnixTime,
    ) -> Result<(), webpki::Error> {
        let lists: Vec<_> = self.revoked.iter().collect();
        // With lists, a certificate that none of them speaks for is refused. None given: nothing to ask.
        let revocation = RevocationOptionsBuilder::new(&lists).ok().map(RevocationOptionsBuilder::build);
        EndEntityCert::try_from(certificate)?
            .verify_for_usage(self.algorithms.all, &self.roots, intermediates, now, usage, revocation, None)
            .map(drop)
    }

    fn admit(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
        now: UnixTime,
    ) -> Result<(), Error> {
        self.chain(certificate, intermediates, usage, now).map_err(refusal)?;
        let names = names(certificate);
        match self.allow.admit(&names) {
            Some(_) => Ok(()),
            None => Err(CertificateError::Other(OtherError(Arc::new(NotListed(names)))).into()),
        }
    }
}

/// The DNS and URI names of a certificate that was verified.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    let fit = |name: &&str| {
        (1..=MAX_NAME).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic()) && !name.contains('*')
    };
    let mut names: Vec<String> = certificate
        .valid_dns_names()
        .chain(certificate.valid_uri_names())
        .filter(fit)
        .take(MAX_NAMES)
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// In the words of rustls, which makes the right alert of them.
fn refusal(error: webpki::Error) -> Error {
    match error {
        webpki::Error::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        webpki::Error::CertNotValidYet { time, not_before } => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        webpki::Error::UnknownIssuer => CertificateError::UnknownIssuer,
        webpki::Error::CertRevoked => CertificateError::Revoked,
        webpki::Error::UnknownRevocationStatus => CertificateError::UnknownRevocationStatus,
        webpki::Error::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        webpki::Error::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
        webpki::Error::BadDer | webpki::Error::BadDerTime | webpki::Error::TrailingData(_) => {
            CertificateError::BadEncoding
        }
        other => CertificateError::Other(OtherError(Arc::new(other))),
    }
    .into()
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.admit(certificate, intermediates, KeyUsage::server_auth(), now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A client has one certificate to choose from, and strangers needn't learn our authorities.
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.admit(certificate, intermediates, KeyUsage::client_auth(), now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier")
            .field("roots", &self.roots.len())
            .field("revocation_lists", &self.revoked.len())
            .field("allow", &self.allow)
            .finish_non_exhaustive()
    }
}
