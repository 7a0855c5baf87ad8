//! NIXL's metadata of an agent, walked before NIXL gets it.
//!
//! It comes from a peer, and NIXL's parser trusts it: a length that leaves the bytes can send it backwards, where it reads the same
//! fields again without end. So nothing is handed over whose fields are not the ones that NIXL will read, each within the bytes and
//! nothing behind the last. What is inside worker addresses and keys is UCX's, and is not looked at, but for being there.
//!
//! A field is a tag, a length of eight bytes of the machine's order, that many bytes, and `|`.

const INTRO: &[u8] = b"nixlSerDes|";
/// Host memory, by NIXL's number.
const DRAM: u32 = 0;
/// The shortest worker address and the shortest key of UCX that have anything in them.
const UCX_LEAST: (usize, usize) = (16, 9);

/// What the metadata says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Metadata<'a> {
    /// The agent's name.
    pub(crate) agent: &'a [u8],
    /// Its registrations of host memory.
    pub(crate) memory: Vec<Registered>,
}

/// One registration: address, length, number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Registered {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) serial: u64,
}

/// Reads metadata; the error says what is wrong.
pub(crate) fn walk(bytes: &[u8]) -> Result<Metadata<'_>, String> {
    let mut fields = Fields { all: bytes.len(), rest: bytes.strip_prefix(INTRO).ok_or("it isn't NIXL's metadata")? };
    let agent = fields.take("Agent")?;
    for _ in 0..fields.number("Conns")? {
        let plugin = fields.take("t")?;
        let address = fields.take("c")?;
        fields.least(plugin, address.len(), UCX_LEAST.0, "an address")?;
    }
    if fields.take("")? != b"MemSection" {
        return Err(format!("its section of memory isn't at byte {}", fields.at()));
    }
    let mut memory = Vec::new();
    for _ in 0..fields.number("nixlSecElms")? {
        let plugin = fields.take("bknd")?;
        if fields.take("nixlDList")? != b"nixlSDList" {
            return Err(format!("its list of memory isn't at byte {}", fields.at()));
        }
        let kind = fields.take("t")?;
        let kind = u32::from_ne_bytes(kind.try_into().map_err(|_| "its kind of memory isn't 4 bytes long")?);
        for _ in 0..fields.number("n")? {
            let entry = fields.take("")?;
            let (place, key) = entry.split_first_chunk::<24>().ok_or("an entry of memory is cut")?;
            fields.least(plugin, key.len(), UCX_LEAST.1, "a key")?;
            if kind == DRAM {
                let mut words = place.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap_or_default()));
                let mut next = || words.next().unwrap_or_default();
                memory.push(Registered { address: next(), len: next(), serial: next() });
            }
        }
    }
    if !fields.rest.is_empty() {
        return Err(format!("{} bytes follow its last field", fields.rest.len()));
    }
    Ok(Metadata { agent, memory })
}

struct Fields<'a> {
    all: usize,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn at(&self) -> usize {
        self.all - self.rest.len()
    }

    /// The next field, which has this tag.
    fn take(&mut self, tag: &str) -> Result<&'a [u8], String> {
        let wrong = |what: &str| format!("its field {tag:?} at byte {} {what}", self.at());
        let rest = self.rest.strip_prefix(tag.as_bytes()).ok_or_else(|| wrong("is not there"))?;
        let (len, rest) = rest.split_first_chunk::<8>().ok_or_else(|| wrong("has no length"))?;
        let len = u64::from_ne_bytes(*len);
        let split = usize::try_from(len).ok().and_then(|len| rest.split_at_checked(len));
        let (value, rest) = split.ok_or_else(|| wrong(&format!("says {len} bytes, and {} are left", rest.len())))?;
        self.rest = rest.strip_prefix(b"|").ok_or_else(|| wrong("has no end"))?;
        Ok(value)
    }

    fn number(&mut self, tag: &str) -> Result<u64, String> {
        let value = self.take(tag)?;
        let value = value.try_into().map_err(|_| format!("its field {tag:?} is {} bytes, not 8", value.len()))?;
        Ok(u64::from_ne_bytes(value))
    }

    /// Refuses what can't be of UCX, which reads it without knowing its length.
    fn least(&self, plugin: &[u8], len: usize, least: usize, what: &str) -> Result<(), String> {
        if plugin == b"UCX" && len < least {
            return Err(format!("{what} before byte {} has {len} bytes, the least are {least}", self.at()));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn field(out: &mut Vec<u8>, tag: &str, value: &[u8]) {
        out.extend_from_slice(tag.as_bytes());
        out.extend_from_slice(&(value.len() as u64).to_ne_bytes());
        out.extend_from_slice(value);
        out.push(b'|');
    }

    /// Metadata of an agent with this memory.
    pub(crate) fn made(agent: &[u8], memory: &[Registered]) -> Vec<u8> {
        let mut out = INTRO.to_vec();
        field(&mut out, "Agent", agent);
        field(&mut out, "Conns", &1u64.to_ne_bytes());
        field(&mut out, "t", b"UCX");
        field(&mut out, "c", &[0xc0; 40]);
        field(&mut out, "", b"MemSection");
        field(&mut out, "nixlSecElms", &u64::from(!memory.is_empty()).to_ne_bytes());
        if !memory.is_empty() {
            field(&mut out, "bknd", b"UCX");
            field(&mut out, "nixlDList", b"nixlSDList");
            field(&mut out, "t", &DRAM.to_ne_bytes());
            field(&mut out, "n", &(memory.len() as u64).to_ne_bytes());
            for r in memory {
                let place = [r.address, r.len, r.serial].map(u64::to_ne_bytes).concat();
                field(&mut out, "", &[&place[..], &[0x4e; 12]].concat());
            }
        }
        out
    }

    const MEMORY: [Registered; 2] =
        [Registered { address: 4096, len: 100, serial: 3 }, Registered { address: 1 << 40, len: 7, serial: u64::MAX }];

    #[test]
    fn what_is_written_is_read_and_cuts_are_refused() {
        let bytes = made(b"kvferry-a", &MEMORY);
        assert_eq!(walk(&bytes), Ok(Metadata { agent: b"kvferry-a", memory: MEMORY.into() }));
        for end in 0..bytes.len() {
            assert!(walk(&bytes[..end]).is_err(), "cut at {end}");
        }
        assert!(walk(&[&bytes[..], b"x"].concat()).unwrap_err().contains("1 bytes follow"));
    }

    #[test]
    fn lengths_and_counts_that_lie_are_refused() {
        let bytes = made(b"kvferry-a", &MEMORY);
        for at in 0..bytes.len() - 8 {
            for lie in [u64::MAX, u64::MAX - 40, 1 << 63, 1 << 32, 0] {
                let mut bytes = bytes.clone();
                bytes[at..at + 8].copy_from_slice(&lie.to_ne_bytes());
                // Addresses and kinds may be anything; what is counted can't grow.
                assert!(walk(&bytes).map_or(0, |m| m.memory.len()) <= 2, "{lie} at {at}");
            }
        }
        let mut back = bytes.clone();
        let conn = bytes.windows(9).position(|w| w == [b"c", &40u64.to_ne_bytes()[..]].concat()).unwrap();
        back[conn + 1..conn + 9].copy_from_slice(&(u64::MAX - 60).to_ne_bytes());
        assert!(walk(&back).unwrap_err().contains("are left"));
    }
}
