//! What requests and registrations are made of, and what they give: owners of NIXL's handles.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use super::{
    DRAM, Fail, check, handle, nixl_capi_create_notif_map, nixl_capi_create_reg_dlist, nixl_capi_create_xfer_dlist,
    nixl_capi_destroy_notif_map, nixl_capi_destroy_reg_dlist, nixl_capi_destroy_xfer_dlist, nixl_capi_notif_map_clear,
    nixl_capi_reg_dlist_add_desc, nixl_capi_xfer_dlist_add_desc, nixl_capi_xfer_dlist_clear,
};

/// A list of registrations.
pub(super) struct RegList(pub(super) NonNull<c_void>);

impl RegList {
    pub(super) fn empty() -> Result<Self, Fail> {
        let mut raw = ptr::null_mut();
        // SAFETY: the result has a place.
        handle(unsafe { nixl_capi_create_reg_dlist(DRAM, &raw mut raw) }, raw).map(Self)
    }

    pub(super) fn one(addr: usize, len: usize, serial: u64) -> Result<Self, Fail> {
        let list = Self::empty()?;
        // SAFETY: the list is alive; the metadata is empty.
        check(unsafe { nixl_capi_reg_dlist_add_desc(list.0.as_ptr(), addr, len, serial, ptr::null(), 0) })?;
        Ok(list)
    }
}

impl Drop for RegList {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { nixl_capi_destroy_reg_dlist(self.0.as_ptr()) };
    }
}

/// A list of places.
#[derive(Debug)]
pub(crate) struct List(pub(super) NonNull<c_void>);

impl List {
    pub(crate) fn new() -> Result<Self, Fail> {
        let mut raw = ptr::null_mut();
        // SAFETY: the result has a place.
        handle(unsafe { nixl_capi_create_xfer_dlist(DRAM, &raw mut raw) }, raw).map(Self)
    }

    pub(crate) fn clear(&mut self) -> Result<(), Fail> {
        // SAFETY: the list is alive.
        check(unsafe { nixl_capi_xfer_dlist_clear(self.0.as_ptr()) })
    }

    pub(crate) fn add(&mut self, addr: usize, len: usize, serial: u64) -> Result<(), Fail> {
        // SAFETY: the list is alive. What it names is checked against registrations when a request is made of it.
        check(unsafe { nixl_capi_xfer_dlist_add_desc(self.0.as_ptr(), addr, len, serial) })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { nixl_capi_destroy_xfer_dlist(self.0.as_ptr()) };
    }
}

/// A request. Must be given back by [`Agent::release`](super::Agent::release); dropped otherwise, it leaks.
#[derive(Debug)]
pub(crate) struct Request(pub(super) NonNull<c_void>);

/// Where notifications are put.
#[derive(Debug)]
pub(crate) struct Notifications(pub(super) NonNull<c_void>);

impl Notifications {
    pub(crate) fn new() -> Result<Self, Fail> {
        let mut raw = ptr::null_mut();
        // SAFETY: the result has a place.
        handle(unsafe { nixl_capi_create_notif_map(&raw mut raw) }, raw).map(Self)
    }

    /// Empties it, if need be by another in its place.
    pub(super) fn clear(&mut self) -> Result<(), Fail> {
        // SAFETY: the map is alive, and nothing of it is referred to, since it is borrowed for itself alone.
        if check(unsafe { nixl_capi_notif_map_clear(self.0.as_ptr()) }).is_err() {
            *self = Self::new()?;
        }
        Ok(())
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { nixl_capi_destroy_notif_map(self.0.as_ptr()) };
    }
}
