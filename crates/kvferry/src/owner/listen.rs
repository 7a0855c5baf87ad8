//! Binding what an owner listens on.

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};

use super::StartError;
use super::options::Options;
use crate::address::Address;
use crate::driver::inbox::Sender;
use crate::driver::{News, PeerListener, SocketFile};
use crate::memory::Listening;
use crate::secure::Security;

/// Binds what other owners connect to; gives the address that references carry, too.
pub(super) async fn peers(
    options: &Options,
    security: &Security,
    news: &Sender<News>,
    sockets: &mut Vec<SocketFile>,
) -> Result<(Option<PeerListener>, Option<Address>), StartError> {
    let Some(wanted) = &options.config.control.listen else { return Ok((None, None)) };
    // Where an address of another kind is advertised, something leads from there to us.
    let reached = [Some(wanted), options.config.control.advertise.as_ref()];
    if let Some(address) = reached.into_iter().flatten().find(|address| !address.is_local())
        && !security.protects()
        && !options.config.security.plaintext_beyond_loopback
    {
        return Err(StartError::Exposed { address: address.clone() });
    }
    let failed = |error| StartError::Listen { address: wanted.to_string(), error };
    let (listener, bound) = match wanted {
        Address::Tcp(socket) => {
            let listener = TcpListener::bind(socket).await.map_err(failed)?;
            let bound = Address::Tcp(listener.local_addr().map_err(failed)?);
            (PeerListener::Tcp(listener), bound)
        }
        Address::Unix(path) => (PeerListener::Unix(bind_unix(path, sockets).map_err(failed)?), wanted.clone()),
        Address::Memory(name) => {
            let taken = || std::io::Error::new(ErrorKind::AddrInUse, "another owner of this process has the name");
            let listening = Listening::start(name, news.clone()).ok_or_else(|| failed(taken()))?;
            (PeerListener::Memory(listening), wanted.clone())
        }
    };
    let address = options.config.control.advertise.clone().unwrap_or(bound);
    if !address.is_definite() {
        return Err(StartError::Advertise { address });
    }
    Ok((Some(listener), Some(address)))
}

/// Binds what the engine's own ranks connect to.
pub(super) fn ranks(options: &Options, sockets: &mut Vec<SocketFile>) -> Result<(UnixListener, PathBuf), StartError> {
    let path = match &options.config.control.rank_socket {
        Some(path) => path.clone(),
        None => {
            let name = format!("kvferry-{:032x}.sock", super::random().map_err(StartError::Random)?);
            std::env::temp_dir().join(name)
        }
    };
    let failed = |error| StartError::Listen { address: path.display().to_string(), error };
    let listener = bind_unix(&path, sockets).map_err(failed)?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).map_err(failed)?;
    Ok((listener, path))
}

/// Listens on a Unix socket. A socket that an owner has left behind when it was killed is replaced.
fn bind_unix(path: &Path, sockets: &mut Vec<SocketFile>) -> std::io::Result<UnixListener> {
    let bound = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_left_behind(path) => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }?;
    sockets.push(SocketFile::new(path));
    Ok(bound)
}

/// Whether nobody listens on this socket any more.
fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let refused = |e: std::io::Error| e.kind() == ErrorKind::ConnectionRefused;
    is_socket && std::os::unix::net::UnixStream::connect(path).err().is_some_and(refused)
}
