//! What certificates and keys are read from, and what is said when that goes wrong.

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn put(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.folder.path().join(name);
        write(&path, text).unwrap();
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    fn fleet(&self, authority: &Authority, own: &Issued) -> TlsBuilder {
        TlsOptions::builder(
            self.put("ca.crt", &authority.0.pem(), 0o644),
            self.put("tls.crt", &own.certificate, 0o644),
            self.put("tls.key", &own.key, 0o640),
        )
    }
}

#[test]
fn sec_a_secret_that_others_may_read_is_refused_unless_that_is_said() {
    let (files, authority) = (Files::new(), Authority::new("fleet"));
    let own = authority.engine("a");
    assert!(files.fleet(&authority, &own).build().is_ok(), "the group may");
    let builder = files.fleet(&authority, &own);
    files.put("tls.key", &own.key, 0o644);
    let error = builder.clone().build().unwrap_err();
    assert!(matches!(&error, SecurityError::Exposed { mode: 0o644, .. }));
    assert!(error.to_string().contains("tls.key") && error.to_string().contains("chmod o-rwx"), "{error}");
    assert!(builder.readable_by_others().build().is_ok());

    let key = files.put("k1.key", &"0f1e2d3c4b5a6978".repeat(4), 0o604);
    let error = SharedKeyOptions::builder("k1", key.as_path()).build().unwrap_err();
    assert!(matches!(&error, SecurityError::Exposed { mode: 0o604, .. }));
    assert!(SharedKeyOptions::builder("k1", key).readable_by_others().build().is_ok());
}

#[test]
fn sec_what_is_missing_or_wrong_is_named_with_its_file_and_cure() {
    let (files, authority) = (Files::new(), Authority::new("fleet"));
    let own = authority.engine("a");
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    for (file, text, what, cure) in [
        ("ca.crt", "", "root certificate", "BEGIN CERTIFICATE"),
        ("tls.crt", "no pem at all", "certificate", "BEGIN CERTIFICATE"),
        ("tls.crt", "-----BEGIN CERTIFICATE-----\nAAAA\n", "cut off", "BEGIN CERTIFICATE"),
        ("tls.crt", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no X.509 certificate", "issue"),
        ("ca.crt", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not valid", "root"),
        ("tls.key", own.certificate.as_str(), "private key", "BEGIN PRIVATE KEY"),
        ("tls.key", encrypted, "no passphrase", "openssl pkey"),
        ("tls.key", authority.engine("b").key.as_str(), "is not the one of the certificate", "tls.crt"),
    ] {
        let builder = files.fleet(&authority, &own);
        files.put(file, text, 0o600);
        let error = builder.build().unwrap_err().to_string();
        for part in [file, what, cure] {
            assert!(error.contains(part), "{part} is missing: {error}");
        }
    }
    for file in ["ca.crt", "tls.crt", "tls.key"] {
        let builder = files.fleet(&authority, &own);
        std::fs::remove_file(files.folder.path().join(file)).unwrap();
        let error = builder.build().unwrap_err();
        assert!(matches!(&error, SecurityError::Unreadable { from, .. } if from.contains(file)), "{error}");
    }
    let builder = files.fleet(&authority, &own);
    files.put("ca.crt", &"x".repeat((1 << 20) + 1), 0o600);
    assert!(matches!(builder.build().unwrap_err(), SecurityError::TooLong { .. }));
    let error = files.fleet(&authority, &authority.issue(&Wanted::new(&[]))).build().unwrap_err().to_string();
    assert!(error.contains("subjectAltName"), "{error}");
    let ca = Issued { certificate: authority.0.pem(), key: authority.0.key().serialize_pem() };
    let error = authority.builder(&ca).build().unwrap_err().to_string();
    assert!(error.contains("authority's own certificate"), "{error}");
    let error = authority.builder(&own).revocation_lists(Material::bytes("nothing")).build().unwrap_err().to_string();
    assert!(error.contains("BEGIN X509 CRL"), "{error}");
}

#[test]
fn sec_no_secret_is_printed() {
    let (files, authority) = (Files::new(), Authority::new("fleet"));
    let own = authority.engine("a");
    let hex = "0f1e2d3c4b5a6978".repeat(4);
    let files_of = files.fleet(&authority, &own);
    let key = SharedKeyOptions::builder("k1", Material::bytes(hex.as_str())).also("k2", secret(3));
    let middle = own.key.lines().nth(1).unwrap();
    let mut printed = vec![
        format!("{:?} {:?}", files_of, files_of.clone().build().unwrap()),
        format!("{:?} {:?}", authority.builder(&own), authority.tls(&own)),
        format!("{:?} {:?}", key, Security::from(key.clone().build().unwrap())),
    ];
    // A key where something else should be.
    for wrong in [own.key.clone(), format!("-----BEGIN {middle}\n")] {
        let own = Issued { certificate: wrong.clone(), key: wrong };
        printed.push(format!("{0} {0:?}", authority.builder(&own).build().unwrap_err()));
    }
    let weak = SharedKeyOptions::builder("k1", Material::bytes(&hex[..40])).build().unwrap_err();
    printed.push(format!("{weak} {weak:?}"));
    for text in printed {
        assert!(!text.contains(&middle[..16]) && !text.contains(&hex[..16]) && !text.contains("[15, 30"), "{text}");
    }
}

/// Renewed files count for new links once they are read; what can't be read changes nothing.
#[tokio::test]
async fn sec_certificates_and_keys_are_renewed_without_a_restart() {
    let (files, authority) = (Files::new(), Authority::new("fleet"));
    let tls: Security = files.fleet(&authority, &authority.engine("old")).build().unwrap().into();
    let kept = tls.clone();
    let peer = authority.tls(&authority.engine("peer"));
    let (mut before, mut far) = linked(&peer, &tls).await;
    assert!(may(&before, "old"));
    drop(files.fleet(&authority, &authority.engine("new")));
    let (link, _far) = linked(&peer, &tls).await;
    assert!(may(&link, "old"), "not read yet");
    kept.reload().unwrap();
    let (link, _far) = linked(&peer, &tls).await;
    assert!(may(&link, "new") && !may(&link, "old"));
    files.put("tls.key", "half a fi", 0o600);
    assert!(matches!(tls.reload(), Err(SecurityError::NotPem { .. })));
    let (link, _far) = linked(&peer, &tls).await;
    assert!(may(&link, "new"));
    // A link that was up goes on.
    far.write_u8(7).await.unwrap();
    assert_eq!(soon(before.read_u8()).await.unwrap(), 7);

    let (a, b) = ("00112233445566778899aabbccddeeff".repeat(2), "f0e1d2c3b4a5968778695a4b3c2d1e0f".repeat(2));
    let path = files.put("k.key", &a, 0o600);
    let key: Security = SharedKeyOptions::builder("k", path).build().unwrap().into();
    let other: Security = SharedKeyOptions::builder("k", Material::bytes(b.as_str())).build().unwrap().into();
    assert!(meet(&key, &other).await.0.is_err());
    files.put("k.key", &b, 0o600);
    key.reload().unwrap();
    assert!(meet(&key, &other).await.0.is_ok());
}
