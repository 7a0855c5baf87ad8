//! A doorbell for endpoints of the same host.
//!
//! NIXL tells nobody that a notification has arrived, so an idle endpoint would have to look often, or let the first question wait. On
//! one host whoever sends also rings: an empty datagram to a socket whose name follows from the endpoint's id, and the sleeper looks
//! at once. It is a hint and no more: lost, forged or not there at all, everything works, a pause later.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvferry_transport::EndpointId;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

/// Rings that are taken at a time; the system queues fewer unless it was told to.
const MOST: usize = 1024;

/// The socket of one endpoint, in the abstract namespace: no file, and gone with the process.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    /// `None` where there are no such sockets.
    pub(crate) fn new(endpoint: EndpointId) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).ok()?;
        bind(&socket, &address(endpoint)?).ok()?;
        Some(Self(socket))
    }

    /// Rings at another endpoint; whether it can be reached so.
    pub(crate) fn ring(&self, at: EndpointId) -> bool {
        let sent = address(at).map(|to| sendto(&self.0, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL, &to));
        // A full queue has woken the sleeper already.
        matches!(sent, Some(Ok(_) | Err(rustix::io::Errno::AGAIN)))
    }

    /// Takes the rings so far, or many of them: whoever rings without end keeps us from sleeping, and from nothing else.
    pub(crate) fn hush(&self) {
        let taken = (0..MOST).take_while(|_| recv(&self.0, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok());
        let _ = taken.count();
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn address(endpoint: EndpointId) -> Option<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(format!("kvferry-nixl-{endpoint}").as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn rings_are_heard_until_hushed() {
        let (a, b) = (EndpointId::new([0xa1; 16]), EndpointId::new([0xb1; 16]));
        let (ours, theirs) = (Bell::new(a).unwrap(), Bell::new(b).unwrap());
        let heard = || {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::from_borrowed_fd(theirs.fd(), PollFlags::IN)], Some(&now)).unwrap() > 0
        };
        assert!(!heard());
        assert!((0..1000).all(|_| ours.ring(b)), "a full queue is no trouble");
        assert!(heard());
        theirs.hush();
        assert!(!heard());
        assert!(!ours.ring(EndpointId::new([0xc1; 16])), "nobody is there");
    }
}
