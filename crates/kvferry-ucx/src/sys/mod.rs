//! Thin owners of UCX's handles: what is unsafe about the library is argued here and in `rail::run`, nowhere else.
//!
//! None of these types is `Send`: a rail's thread makes them, uses them and drops them. UCX wants the order kept in which
//! they go (remote keys and memory before the worker's context, endpoints before their worker); the rail's thread
//! sees to it.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;

use ucx_rs::sys as ucp;

mod context;
mod endpoint;
mod worker;

pub(crate) use context::{Context, ContextError, Memory};
pub(crate) use endpoint::{Closing, Endpoint, RemoteKey};
pub(crate) use worker::{Header, Worker};

/// A status of UCX that is no success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Status(pub(crate) ucp::ucs_status_t);

impl Status {
    pub(crate) const BUSY: Self = Self(ucp::ucs_status_t_UCS_ERR_BUSY);
    pub(crate) const INVALID: Self = Self(ucp::ucs_status_t_UCS_ERR_INVALID_PARAM);
    pub(crate) const NO_DEVICE: Self = Self(ucp::ucs_status_t_UCS_ERR_NO_DEVICE);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ucx_rs::status_string(self.0))
    }
}

pub(super) fn check(status: ucp::ucs_status_t) -> Result<(), Status> {
    if status == ucp::ucs_status_t_UCS_OK { Ok(()) } else { Err(Status(status)) }
}

/// What a call that may go on later has returned.
pub(super) enum Posted {
    Done,
    Failed(Status),
    Later(NonNull<c_void>),
}

pub(super) fn posted(returned: *mut c_void) -> Posted {
    // `UCS_PTR_IS_ERR` and `UCS_PTR_STATUS` are macros: statuses from -100 to -1 are pointers at the very top.
    let raw = returned.addr().cast_signed();
    match NonNull::new(returned) {
        None => Posted::Done,
        Some(_) if (isize::from(ucp::ucs_status_t_UCS_ERR_LAST)..0).contains(&raw) => {
            Posted::Failed(Status(ucp::ucs_status_t::try_from(raw).unwrap_or(ucp::ucs_status_t_UCS_ERR_IO_ERROR)))
        }
        Some(request) => Posted::Later(request),
    }
}

/// The state of operations that were posted together: how many have not ended, and how the first bad one did.
#[derive(Debug)]
pub(crate) struct Tally {
    outstanding: Cell<u32>,
    failed: Cell<Option<Status>>,
    /// Of the whole rail.
    rail: Rc<Cell<u32>>,
}

impl Tally {
    pub(crate) fn new(rail: Rc<Cell<u32>>) -> Rc<Self> {
        Rc::new(Self { outstanding: Cell::new(0), failed: Cell::new(None), rail })
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.outstanding.get()
    }

    pub(crate) fn failed(&self) -> Option<Status> {
        self.failed.get()
    }

    pub(super) fn begin(&self) {
        self.outstanding.set(self.outstanding.get() + 1);
        self.rail.set(self.rail.get() + 1);
    }

    pub(super) fn end(&self) {
        self.outstanding.set(self.outstanding.get() - 1);
        self.rail.set(self.rail.get() - 1);
    }

    pub(super) fn fail(&self, status: Status) {
        self.failed.set(self.failed.get().or(Some(status)));
    }
}

/// UCX calls this when an operation counted by a [`Tally`] has ended.
pub(super) unsafe extern "C" fn tallied(request: *mut c_void, status: ucp::ucs_status_t, user_data: *mut c_void) {
    // SAFETY: the user data is a tally of which `Endpoint::tally` gave away one count, taken back here: this
    // runs once for each request.
    let tally = unsafe { Rc::from_raw(user_data.cast_const().cast::<Tally>()) };
    if let Err(status) = check(status) {
        tally.fail(status);
    }
    tally.end();
    // SAFETY: the request is complete and nobody else frees it.
    unsafe { ucp::ucp_request_free(request) };
}
