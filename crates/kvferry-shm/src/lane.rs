//! The part of a blob that only this backend reads: where the endpoint listens, the token that it wants to hear, and
//! how many of its regions can't be mapped.

/// The longest name of an abstract socket.
pub(crate) const MAX_NAME: usize = 107;

const VERSION: u8 = 1;

/// The lane part of a blob.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LanePart {
    /// Name of the socket in the abstract namespace.
    pub(crate) name: Vec<u8>,
    /// Proves to the endpoint that the peer was given its blob, this one and not an earlier life's.
    pub(crate) token: [u8; 16],
    /// How many of the regions are not backed by a memfd.
    pub(crate) plain: u32,
}

impl LanePart {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend_from_slice(&self.token);
        out.extend_from_slice(&self.plain.to_le_bytes());
        out.extend_from_slice(&self.name);
        out
    }

    /// Parses; the error says what is wrong.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let cut = || format!("it has {} bytes", bytes.len());
        let (&version, rest) = bytes.split_first().ok_or_else(cut)?;
        if version != VERSION {
            return Err(format!("its version is {version}, ours is {VERSION}"));
        }
        let (token, rest) = rest.split_first_chunk::<16>().ok_or_else(cut)?;
        let (plain, name) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(format!("its socket name has {} bytes, allowed are 1 to {MAX_NAME}", name.len()));
        }
        Ok(Self { name: name.to_vec(), token: *token, plain: u32::from_le_bytes(*plain) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_cuts() {
        let part = LanePart { name: b"kvferry-1".to_vec(), token: [5; 16], plain: 3 };
        let bytes = part.encode();
        assert_eq!(LanePart::decode(&bytes), Ok(part.clone()));
        for end in 0..bytes.len() {
            assert_ne!(LanePart::decode(&bytes[..end]), Ok(part.clone()));
        }
        assert!(LanePart::decode(&[&bytes[..], &[0; MAX_NAME]].concat()).unwrap_err().contains("socket name"));
        assert!(LanePart::decode(&[&[9][..], &bytes[1..]].concat()).unwrap_err().contains("version is 9"));
    }
}
