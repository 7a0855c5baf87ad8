//! What NIXL hands over as notifications, read so that no sender can keep the others' from being told.
//!
//! A sender's name is what it wrote itself. The C interface looks senders up by texts that end with a zero, so one with a zero in
//! its name is not found, or is taken for another. Such a sender is passed over.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use super::{
    Fail, Handle, Notifications, check, nixl_capi_notif_map_get_agent_at, nixl_capi_notif_map_get_notif,
    nixl_capi_notif_map_get_notifs_size, nixl_capi_notif_map_size,
};

/// Senders and what they sent.
pub(super) trait Notices {
    fn senders(&self) -> Result<usize, Fail>;
    fn name(&self, sender: usize) -> Result<&CStr, Fail>;
    fn count(&self, name: &CStr) -> Result<usize, Fail>;
    fn bytes(&self, name: &CStr, index: usize) -> Result<&[u8], Fail>;
}

/// Tells each notification that can be read; how many senders there are, at least one if that is not known.
pub(super) fn tell(notices: &impl Notices, mut each: impl FnMut(&CStr, &[u8])) -> usize {
    let Ok(senders) = notices.senders() else { return 1 };
    let mut told: BTreeSet<CString> = BTreeSet::new();
    for sender in 0..senders {
        let Ok(name) = notices.name(sender) else { continue };
        let Ok(count) = notices.count(name) else { continue };
        // One that is cut to another's name would have the other's told twice.
        if senders > 1 && !told.insert(name.to_owned()) {
            continue;
        }
        for index in 0..count {
            if let Ok(bytes) = notices.bytes(name, index) {
                each(name, bytes);
            }
        }
    }
    senders
}

impl Notifications {
    fn raw(&self) -> Handle {
        self.0.as_ptr()
    }
}

impl Notices for Notifications {
    fn senders(&self) -> Result<usize, Fail> {
        let mut senders = 0;
        // SAFETY: the map is alive, the result has a place.
        check(unsafe { nixl_capi_notif_map_size(self.raw(), &raw mut senders) }).map(|()| senders)
    }

    fn name(&self, sender: usize) -> Result<&CStr, Fail> {
        let mut name: *const c_char = ptr::null();
        // SAFETY: the map is alive, the result has a place; an index beyond its size is refused.
        check(unsafe { nixl_capi_notif_map_get_agent_at(self.raw(), sender, &raw mut name) })?;
        if name.is_null() {
            return Err(Fail::InvalidState);
        }
        // SAFETY: a text of the map's own, which does not change while it is borrowed.
        Ok(unsafe { CStr::from_ptr(name) })
    }

    fn count(&self, name: &CStr) -> Result<usize, Fail> {
        let mut count = 0;
        // SAFETY: the map is alive, the name ends with a zero, the result has a place.
        check(unsafe { nixl_capi_notif_map_get_notifs_size(self.raw(), name.as_ptr(), &raw mut count) }).map(|()| count)
    }

    fn bytes(&self, name: &CStr, index: usize) -> Result<&[u8], Fail> {
        let (mut data, mut len): (*const c_void, usize) = (ptr::null(), 0);
        // SAFETY: the map is alive, the name ends with a zero, the results have places; an index beyond the count is refused.
        check(unsafe { nixl_capi_notif_map_get_notif(self.raw(), name.as_ptr(), index, &raw mut data, &raw mut len) })?;
        if data.is_null() || len == 0 {
            return Ok(&[]);
        }
        // SAFETY: `len` bytes of the map's, which does not change while it is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NIXL's map: names as their senders wrote them, looked up by what is before a zero.
    struct Fake(Vec<(&'static [u8], Vec<&'static [u8]>)>);

    fn cut(name: &'static [u8]) -> &'static CStr {
        CStr::from_bytes_until_nul(name).unwrap()
    }

    impl Notices for Fake {
        fn senders(&self) -> Result<usize, Fail> {
            Ok(self.0.len())
        }

        fn name(&self, sender: usize) -> Result<&CStr, Fail> {
            self.0.get(sender).map(|(name, _)| cut(name)).ok_or(Fail::InvalidParam)
        }

        fn count(&self, name: &CStr) -> Result<usize, Fail> {
            let found = self.0.iter().find(|(n, _)| *n == name.to_bytes_with_nul());
            found.map(|(_, sent)| sent.len()).ok_or(Fail::InvalidParam)
        }

        fn bytes(&self, name: &CStr, index: usize) -> Result<&[u8], Fail> {
            let found = self.0.iter().find(|(n, _)| *n == name.to_bytes_with_nul());
            found.and_then(|(_, sent)| sent.get(index).copied()).ok_or(Fail::InvalidParam)
        }
    }

    #[test]
    fn a_name_with_a_zero_in_it_hides_nobody_and_repeats_nobody() {
        let fake = Fake(vec![
            (b"a\0", vec![b"1", b"2"]),
            (b"nobody\0x\0", vec![b"lost"]),
            (b"a\0again\0", vec![b"lost"]),
            (b"b\0", vec![b"3"]),
        ]);
        let mut told = Vec::new();
        assert_eq!(tell(&fake, |name, bytes| told.push((name.to_owned(), bytes.to_vec()))), 4);
        let expected: Vec<(CString, Vec<u8>)> =
            [(c"a", b"1"), (c"a", b"2"), (c"b", b"3")].map(|(n, b)| (n.to_owned(), b.to_vec())).into();
        assert_eq!(told, expected);
    }
}
