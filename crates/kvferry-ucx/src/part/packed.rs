//! Worker addresses and remote keys as UCX packs them, walked before UCX does.
//!
//! UCX takes neither's length: its parsers follow the lengths inside, index arrays by numbers they find, and end the process where
//! they meet a version they don't know. So bytes of a peer reach UCX only if this walk, which takes the same steps, ends exactly
//! where the bytes end and finds nothing on the way that UCX would abort at or index by. All numbers are little-endian:
//!
//! ```text
//! address, v1: version u4 = 0, flags u4            | uuid u64 | [client u64] | [name: len u8, bytes] | devices
//! address, v2: version u4 = 1, release u4, flags u8 | the same
//! device:      domain u7, empty u1 | len u5, flags u3 | [paths u8] | [system device u8] | address
//!              | unless empty: transports, the last of them marked; so is the last device
//! transport:   checksum of its name u16 | attributes (v1: 16, v2: 8) | len u6, flags u2 | address
//! key:         domains u64, a bit each | memory type u8 | each domain: len u8, bytes
//!              | if any: system device u8 | if known: (device u8, latency u8, bandwidth u8)... | 0xff
//! ```
//!
//! In v2 a length or domain with all bits set is followed by the real one in a byte of its own. At the end of a v1 address stands an
//! empty device whose domain is the release.
//!
//! What is *not* checked are the addresses and keys of the transports themselves, which only those understand: a process number for
//! `cma`, a segment for `posix` and `sysv`, a socket's address. A peer that lies about these is believed.

/// Zeros behind an address. The walk shows that UCX's parser ends before them; a transport may read more than the peer has given it:
/// at most a structure of some 64 bytes, or a path, which a zero ends.
pub(crate) const ADDRESS_SLACK: usize = 256;

/// Behind a key: what ends UCX's list of devices, then zeros for the same reason as in [`ADDRESS_SLACK`].
pub(crate) const KEY_SLACK: [u8; 256] = {
    let mut slack = [0; 256];
    (slack[0], slack[1], slack[2]) = (UNKNOWN_DEVICE, UNKNOWN_DEVICE, UNKNOWN_DEVICE);
    slack
};

/// The most that one may have, since their lengths are told in 16 bits.
const MAX_LEN: usize = u16::MAX as usize;
const UNKNOWN_DEVICE: u8 = 0xff;
/// UCX's numbers of memory domains are bits of 64.
const MAX_DOMAINS: u8 = 64;
const MAX_DEVICES: usize = 64;
/// `UCP_MAX_RESOURCES`: what UCX's list has room for.
const MAX_TRANSPORTS: usize = 128;
/// Only the last four bits of a release's minor number are told. These are 1.20 to 1.29: since 1.20 keys are packed as here, and
/// from further away 1.22 takes the bits for another number.
const RELEASES: std::ops::RangeInclusive<u8> = 4..=13;

/// What is known of a transport.
struct Known {
    name: &'static str,
    /// Whose memory domains it uses; UCX takes the kind of a domain from the last transport that it finds there.
    component: &'static str,
    /// The shortest device and interface address that it reads without looking at the length, or at all: UCX gives it a
    /// null pointer for an empty one.
    device: usize,
    interface: usize,
}

const fn known(name: &'static str, component: &'static str, device: usize, interface: usize) -> Known {
    Known { name, component, device, interface }
}

const KNOWN: [Known; 19] = [
    known("self", "self", 0, 8),
    known("tcp", "tcp", 2, 2),
    known("posix", "posix", 8, 8),
    known("sysv", "sysv", 8, 8),
    known("xpmem", "xpmem", 8, 8),
    known("cma", "cma", 8, 4),
    known("knem", "knem", 8, 0),
    known("rc_verbs", "ib", 1, 0),
    known("rc_mlx5", "ib", 1, 1),
    known("dc_mlx5", "ib", 1, 1),
    known("ud_verbs", "ib", 1, 1),
    known("ud_mlx5", "ib", 1, 1),
    known("srd", "ib", 1, 1),
    known("gga_mlx5", "gga", 1, 1),
    known("cuda_copy", "cuda_copy", 0, 1),
    known("cuda_ipc", "cuda_ipc", 1, 1),
    known("gdr_copy", "gdr_copy", 0, 1),
    known("rocm_copy", "rocm_copy", 0, 1),
    known("rocm_ipc", "rocm_ipc", 1, 1),
];

/// CRC-16-CCITT, which stands for a transport's name.
const fn checksum(name: &str) -> u16 {
    let (bytes, mut crc, mut at) = (name.as_bytes(), u16::MAX, 0);
    while at < bytes.len() {
        crc ^= bytes[at] as u16;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x8408 } else { crc >> 1 };
            bit += 1;
        }
        at += 1;
    }
    !crc
}

/// Bytes that are taken one after another.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], String> {
        let (head, tail) = self.0.split_at_checked(len).ok_or_else(|| format!("it ends inside {what}"))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let (head, tail) = self.0.split_first_chunk().ok_or_else(|| format!("it ends inside {what}"))?;
        self.0 = tail;
        Ok(*head)
    }

    fn byte(&mut self, what: &str) -> Result<u8, String> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    /// A number in some bits of a byte, or in the next byte; and the byte's other bits.
    fn extended(&mut self, mask: u8, v2: bool, what: &str) -> Result<(u8, u8), String> {
        let byte = self.byte(what)?;
        let value = if v2 && byte & mask == mask { self.byte(what)? } else { byte & mask };
        Ok((value, byte & !mask))
    }
}

/// Whether these bytes are a worker's address that UCX can be given, followed by [`ADDRESS_SLACK`]; if not, why.
pub(crate) fn check_address(address: &[u8]) -> Result<(), String> {
    walk_address(address).map_err(|why| format!("a rail's address of {} bytes: {why}", address.len()))
}

fn walk_address(address: &[u8]) -> Result<(), String> {
    const NAME: u8 = 1;
    const UUID: u8 = 2;
    const CLIENT: u8 = 4;
    if address.len() > MAX_LEN {
        return Err(format!("at most {MAX_LEN} are allowed"));
    }
    let mut rest = Rest(address);
    let first = rest.byte("its version")?;
    let (v2, flags, mut release) = match first & 0xf {
        0 => (false, first >> 4, None),
        1 => (true, rest.byte("its flags")?, Some(first >> 4)),
        // Here UCX ends the process.
        other => return Err(format!("its version is {other}; UCX knows 0 and 1")),
    };
    if flags & UUID == 0 {
        return Err("its worker has no identity".to_owned());
    }
    rest.take(8, "the worker's identity")?;
    if flags & CLIENT != 0 {
        rest.take(8, "the client's identity")?;
    }
    if flags & NAME != 0 {
        let len = rest.byte("a name")?;
        rest.take(len.into(), "a name")?;
    }
    let mut components: [Option<&str>; MAX_DOMAINS as usize] = [None; MAX_DOMAINS as usize];
    let (mut devices, mut transports, mut last) = (0, 0, false);
    while !last {
        let device = device(&mut rest, v2)?;
        last = device.last;
        if device.empty && last && !v2 {
            release = Some(device.domain & 0xf);
        }
        devices += 1;
        if devices > MAX_DEVICES {
            return Err(format!("it has more than {MAX_DEVICES} devices"));
        }
        let mut last = device.empty;
        while !last {
            transports += 1;
            if transports > MAX_TRANSPORTS {
                return Err(format!("it has more than {MAX_TRANSPORTS} transports"));
            }
            last = transport(&mut rest, v2, &device, &mut components)?;
        }
    }
    if transports == 0 {
        return Err("it has no transport".to_owned());
    }
    if !release.is_some_and(|release| RELEASES.contains(&release)) {
        return Err("it is of another release of UCX; 1.20 to 1.29 are understood".to_owned());
    }
    if rest.0.is_empty() { Ok(()) } else { Err(format!("{} bytes behind its end", rest.0.len())) }
}

struct Device {
    domain: u8,
    /// Bytes of its address.
    len: usize,
    /// Without transports.
    empty: bool,
    /// In the list.
    last: bool,
}

fn device(rest: &mut Rest<'_>, v2: bool) -> Result<Device, String> {
    const LAST: u8 = 0x80;
    const PATHS: u8 = 0x40;
    const SYSTEM: u8 = 0x20;
    // This byte alone would stand for an address without devices.
    if rest.0.first() == Some(&UNKNOWN_DEVICE) {
        return Err("it has no devices".to_owned());
    }
    let (domain, empty) = rest.extended(0x7f, v2, "a device's domain")?;
    if domain >= MAX_DOMAINS {
        return Err(format!("a device is of memory domain {domain}; UCX has up to {MAX_DOMAINS}"));
    }
    let (len, flags) = rest.extended(0x1f, v2, "a device's length")?;
    if flags & PATHS != 0 && rest.byte("a device's paths")? == 0 {
        return Err("a device has no paths".to_owned());
    }
    if flags & SYSTEM != 0 {
        rest.byte("a system device")?;
    }
    rest.take(len.into(), "a device's address")?;
    Ok(Device { domain, len: len.into(), empty: empty != 0, last: flags & LAST != 0 })
}

/// Whether it is the device's last.
fn transport(
    rest: &mut Rest<'_>,
    v2: bool,
    device: &Device,
    components: &mut [Option<&str>; MAX_DOMAINS as usize],
) -> Result<bool, String> {
    const LAST: u8 = 0x80;
    const ENDPOINTS: u8 = 0x40;
    let name = u16::from_le_bytes(rest.array("a transport's name")?);
    attributes(rest, v2)?;
    let (len, flags) = rest.extended(0x3f, v2, "an interface's length")?;
    // Only messages of UCX itself have them, and numbers in them that it trusts.
    if flags & ENDPOINTS != 0 {
        return Err("it has addresses of endpoints; a worker's has none".to_owned());
    }
    let len = usize::from(len);
    rest.take(len, "an interface's address")?;
    if let Some(known) = KNOWN.iter().find(|known| checksum(known.name) == name) {
        if device.len < known.device || len < known.interface {
            return Err(format!(
                "{} has addresses of {} and {len} bytes; it needs {} and {}",
                known.name, device.len, known.device, known.interface
            ));
        }
        let slot = components.get_mut(usize::from(device.domain));
        if let Some(Some(other)) = slot.map(|slot| slot.replace(known.component))
            && other != known.component
        {
            return Err(format!("memory domain {} is of {other} and of {}", device.domain, known.component));
        }
    }
    Ok(flags & LAST != 0)
}

/// What a transport can do, as numbers that UCX compares: it ends the process where one compares to nothing.
fn attributes(rest: &mut Rest<'_>, v2: bool) -> Result<(), String> {
    let bad = || Err("a transport's speed is no number that one could have".to_owned());
    if v2 {
        // Eight bits each: the exponent in the lower four, 0 for zero and 15 for no number.
        let [overhead, bandwidth, latency] = rest.array("a transport's attributes")?;
        let time = |packed: u8| packed == 0 || (1..15).contains(&(packed & 0xf));
        if !(1..15).contains(&(bandwidth & 0xf)) || !time(overhead) || !time(latency) {
            return bad();
        }
        rest.byte("a transport's attributes")?;
        // In units of 64 bytes: UCX's own messages must go into one.
        let segment = 64 * u32::from(u16::from_le_bytes(rest.array("a transport's attributes")?));
        if (1..1024).contains(&segment) {
            return Err(format!("a transport takes messages of {segment} bytes; 1024 are the least"));
        }
        rest.take(2, "a transport's attributes")?;
        return Ok(());
    }
    let mut number = || Ok::<_, String>(f32::from_le_bytes(rest.array("a transport's attributes")?));
    let (overhead, bandwidth, latency) = (number()?, number()?, number()?);
    // Seconds, and bytes in a second.
    let time = 0.0..=3600.0;
    if !time.contains(&overhead) || !time.contains(&latency) || !(1.0..=1e18).contains(&bandwidth) {
        return bad();
    }
    rest.take(4, "a transport's attributes")?;
    Ok(())
}

/// Whether these bytes are a key to host memory that UCX can be given, followed by [`KEY_SLACK`]; if not, why.
pub(crate) fn check_key(key: &[u8]) -> Result<(), String> {
    walk_key(key).map_err(|why| format!("a key of {} bytes: {why}", key.len()))
}

fn walk_key(key: &[u8]) -> Result<(), String> {
    const HOST: u8 = 0;
    if key.len() > MAX_LEN {
        return Err(format!("at most {MAX_LEN} are allowed"));
    }
    let mut rest = Rest(key);
    let domains = u64::from_le_bytes(rest.array("its domains")?);
    let memory = rest.byte("its memory type")?;
    if memory != HOST {
        return Err(format!("it is for memory of type {memory}, not for host memory"));
    }
    for _ in 0..domains.count_ones() {
        let len = rest.byte("a domain's key")?;
        rest.take(len.into(), "a domain's key")?;
    }
    if domains != 0 && rest.byte("its system device")? != UNKNOWN_DEVICE {
        while rest.byte("its list of devices")? != UNKNOWN_DEVICE {
            rest.take(2, "its list of devices")?;
        }
    }
    if rest.0.is_empty() { Ok(()) } else { Err(format!("{} bytes behind its end", rest.0.len())) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An address of a worker with tcp and with cma.
    pub(crate) fn address(v2: bool) -> Vec<u8> {
        let mut out = if v2 { vec![0x61, 2] } else { vec![0x20] };
        out.extend([7; 8]);
        let mut device = |domain: u8, name: &str, address: &[u8], interface: &[u8], last: u8| {
            out.extend([domain, u8::try_from(address.len()).unwrap() | last]);
            out.extend(address);
            out.extend(checksum(name).to_le_bytes());
            match v2 {
                true => out.extend([0x11, 0x1e, 0x01, 0, 200, 0, 0, 0]),
                false => [1e-6f32, 1e9, 0.0].iter().for_each(|number| out.extend(number.to_le_bytes())),
            }
            if !v2 {
                out.extend([0; 4]);
            }
            out.push(u8::try_from(interface.len()).unwrap() | 0x80);
            out.extend(interface);
        };
        device(0, "tcp", &[0, 2, 127, 0, 0, 1], &[1, 2], 0);
        device(5, "cma", &[9; 8], &[1; 4], if v2 { 0x80 } else { 0 });
        if !v2 {
            out.extend([0x86, 0x80]);
        }
        out
    }

    /// A key with two domains.
    pub(crate) fn key(fill: u8) -> Vec<u8> {
        [&[0x11, 0, 0, 0, 0, 0, 0, 0, 0, 2, fill, fill, 0, UNKNOWN_DEVICE][..]].concat()
    }

    fn refused(address: &[u8], why: &str) {
        let text = check_address(address).unwrap_err();
        assert!(text.contains(why), "{text}");
    }

    #[test]
    fn names_have_the_checksums_that_they_have_in_ucx() {
        // CRC-16/X-25's check value.
        assert_eq!(checksum("123456789"), 0x906e);
        let mut sums: Vec<_> = KNOWN.iter().map(|known| checksum(known.name)).collect();
        sums.sort_unstable();
        sums.dedup();
        assert_eq!(sums.len(), KNOWN.len());
    }

    #[test]
    fn addresses_are_followed_to_their_end() {
        for v2 in [false, true] {
            let good = address(v2);
            check_address(&good).unwrap();
            for end in 0..good.len() {
                assert!(check_address(&good[..end]).is_err(), "v2 {v2}, cut at {end}");
            }
            refused(&[&good[..], &[0]].concat(), "1 bytes behind its end");
        }
        refused(&vec![0; 1 << 16], "at most 65535");
    }

    #[test]
    fn what_ucx_would_abort_at_or_index_by_is_refused() {
        let with = |v2: bool, at: usize, byte: u8| {
            let mut changed = address(v2);
            changed[at] = byte;
            changed
        };
        for version in 2..16 {
            refused(&with(false, 0, 0x20 | version), "UCX knows 0 and 1");
        }
        refused(&with(false, 0, 0), "no identity");
        // The first device, of tcp, begins at 9; the second, of cma, at 38.
        refused(&with(false, 9, 0xff), "no devices");
        refused(&with(false, 9, 64), "memory domain 64");
        refused(&with(false, 38, 0), "memory domain 0 is of tcp and of cma");
        refused(&with(false, 10, 0x46), "no paths");
        let bandwidth = 9 + 2 + 6 + 2 + 4;
        for number in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e30] {
            let mut changed = address(false);
            changed[bandwidth..bandwidth + 4].copy_from_slice(&f32::to_le_bytes(number));
            refused(&changed, "speed");
        }
        let interface = 9 + 2 + 6 + 2 + 16;
        refused(&with(false, interface, 0xc2), "addresses of endpoints");
        refused(&with(false, interface, 0x80), "tcp has addresses of 6 and 0 bytes");
        let last = address(false).len() - 2;
        refused(&with(false, last, 0x83), "another release");
        refused(&with(true, 0, 0x21), "another release");
        for speed in [0x00, 0x10, 0x0f] {
            refused(&with(true, 10 + 2 + 6 + 2 + 1, speed), "speed");
        }
        refused(&with(true, 10 + 2 + 6 + 2 + 4, 3), "messages of 192 bytes");
        // Lists that are as long as one likes to make them.
        let empty = [0x83u8, 0];
        refused(&[&address(false)[..9], &empty.repeat(200)].concat(), "more than 64 devices");
        let mut long = address(false)[..17].to_vec();
        let transport = [&address(false)[17..interface], &[2, 1, 2]].concat();
        long.extend(transport.repeat(200));
        refused(&long, "more than 128 transports");
    }

    #[test]
    fn keys_are_followed_to_their_end() {
        let plain = key(3);
        let none = vec![0; 9];
        let near = [&plain[..13], &[1, 2, 0xff, 0xff, 5, 1, 1, UNKNOWN_DEVICE]].concat();
        for good in [&plain, &none, &near] {
            check_key(good).unwrap();
            for end in 0..good.len() {
                assert!(check_key(&good[..end]).is_err(), "{good:?} cut at {end}");
            }
            let longer = check_key(&[good, &[0][..]].concat()).unwrap_err();
            assert!(longer.contains("1 bytes behind its end"), "{longer}");
        }
        let mut changed = plain.clone();
        changed[8] = 1;
        assert!(check_key(&changed).unwrap_err().contains("memory of type 1"));
        for (at, byte) in [(9, 0xff), (9, 0), (12, 0xff), (13, 0), (0, 0xff), (0, 0), (7, 0x80)] {
            changed.clone_from(&plain);
            changed[at] = byte;
            assert!(check_key(&changed).is_err(), "{byte} at {at}");
        }
        assert!(check_key(&[0; 1 << 16]).unwrap_err().contains("at most 65535"));
    }
}
