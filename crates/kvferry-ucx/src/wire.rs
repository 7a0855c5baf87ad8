//! The messages between two rails, as active messages: what stands before the [access protocol](kvferry_transport::access)
//! and around it.
//!
//! A caller's worker and an answering worker of the other endpoint talk; a message says in its header what it is and for
//! which connection (by the caller's number) or guest (by the answerer's number) it is.

use kvferry_transport::EndpointId;

use crate::process::Process;

/// Caller to answerer: who I am and where I'm reached. Header: zeros.
pub(crate) const HELLO: u8 = 1;
/// Answerer to caller: you are the guest of this id. Header: the connection's ear.
pub(crate) const WELCOME: u8 = 2;
/// Answerer to caller: no, because. Header: the connection's ear.
pub(crate) const REFUSE: u8 = 3;
/// Caller to answerer: `Begin` or `End`. Header: the guest's id.
pub(crate) const ASK: u8 = 4;
/// Answerer to caller: `Answer`. Header: the connection's ear.
pub(crate) const ANSWER: u8 = 5;
/// Caller to answerer: I'm done with you, and have said `End` so many times. Header: the guest's id.
pub(crate) const LEAVE: u8 = 6;
/// Answerer to caller: I'm going; stop, and say `End`. Header: the connection's ear.
pub(crate) const GOING: u8 = 7;
/// Answerer to caller: I have told the notification of an `End`, or not. Header: the connection's ear.
pub(crate) const TOLD: u8 = 8;

/// Sixteen random bytes that only the two sides of a connection know: where one of them hears the other. Everybody can send a message
/// to a worker, so a number that can be guessed would do for nobody.
pub(crate) type Ear = [u8; 16];

/// An ear that nobody has yet; `None` if the system has no randomness.
pub(crate) fn fresh_ear() -> Option<Ear> {
    let mut ear = [0; 16];
    getrandom::fill(&mut ear).ok().map(|()| ear)
}

/// The body of [`HELLO`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// From the answerer's blob.
    pub(crate) token: [u8; 16],
    /// Who is meant.
    pub(crate) to: EndpointId,
    /// Where the caller hears the answerer.
    pub(crate) ear: Ear,
    pub(crate) caller: Caller,
    pub(crate) process: Process,
    /// Of the caller's worker.
    pub(crate) address: Vec<u8>,
}

/// A connection, by its caller's word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Caller {
    pub(crate) endpoint: EndpointId,
    pub(crate) conn: u64,
    /// Of the caller: two of its rails may talk to one of the answerer's.
    pub(crate) rail: u8,
}

impl Caller {
    const LEN: usize = 16 + 8 + 1;

    pub(crate) fn encode(&self) -> Vec<u8> {
        [&self.endpoint.get()[..], &self.conn.to_le_bytes(), &[self.rail]].concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (endpoint, rest) = bytes.split_first_chunk::<16>()?;
        let (conn, rest) = rest.split_first_chunk::<8>()?;
        let [rail] = rest else { return None };
        Some(Self { endpoint: EndpointId::new(*endpoint), conn: u64::from_le_bytes(*conn), rail: *rail })
    }
}

/// The body of [`TOLD`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Told {
    pub(crate) op: u64,
    /// False if the operation wasn't open.
    pub(crate) told: bool,
}

impl Told {
    pub(crate) fn encode(self) -> Vec<u8> {
        [&self.op.to_le_bytes()[..], &[u8::from(self.told)]].concat()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (op, rest) = bytes.split_first_chunk()?;
        let told = match rest {
            [0] => false,
            [1] => true,
            _ => return None,
        };
        Some(Self { op: u64::from_le_bytes(*op), told })
    }
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = [&self.token[..], &self.to.get(), &self.ear, &self.caller.encode()].concat();
        self.process.encode(&mut out);
        out.extend_from_slice(&self.address);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (token, rest) = bytes.split_first_chunk::<16>()?;
        let (to, rest) = rest.split_first_chunk::<16>()?;
        let (ear, rest) = rest.split_first_chunk::<16>()?;
        let (caller, rest) = rest.split_first_chunk::<{ Caller::LEN }>()?;
        let (process, address) = rest.split_first_chunk::<{ Process::LEN }>()?;
        Some(Self {
            token: *token,
            to: EndpointId::new(*to),
            ear: *ear,
            caller: Caller::decode(caller)?,
            process: Process::decode(process),
            address: address.to_vec(),
        })
    }
}

/// The body of [`WELCOME`].
pub(crate) fn guest(body: &[u8]) -> Option<Ear> {
    body.try_into().ok()
}

/// The body of [`LEAVE`]: UCX doesn't promise that messages arrive in order, so the last of so many `End`s may come later.
pub(crate) fn ends(body: &[u8]) -> Option<u64> {
    body.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_come_back() {
        let caller = Caller { endpoint: EndpointId::new([2; 16]), conn: 77, rail: 3 };
        let process = Process { host: [4; 16], namespace: 5, pid: 6, started: 7 };
        let (to, ear) = (EndpointId::new([3; 16]), [9; 16]);
        let hello = Hello { token: [1; 16], to, ear, caller, process, address: vec![8; 40] };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        let head = bytes.len() - 40;
        assert!((0..head).all(|end| Hello::decode(&bytes[..end]).is_none()));
        assert_eq!(Caller::decode(&caller.encode()), Some(caller));
        assert_eq!((Caller::decode(&[0; 24]), Caller::decode(&[0; 26])), (None, None));
        assert_eq!((guest(&[9; 16]), guest(&[0; 7])), (Some([9; 16]), None));
        assert_eq!((ends(&9u64.to_le_bytes()), ends(&[0; 7])), (Some(9), None));
        for told in [false, true] {
            let told = Told { op: 12, told };
            assert_eq!(Told::decode(&told.encode()), Some(told));
        }
        assert_eq!((Told::decode(&[0; 8]), Told::decode(&[2; 9]), Told::decode(&[0; 10])), (None, None, None));
    }

    #[test]
    fn ears_differ() {
        assert_ne!(fresh_ear().unwrap(), fresh_ear().unwrap());
    }
}
