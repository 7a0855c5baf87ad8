//! Workers: progress, sleep, and the messages that come in.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::rc::Rc;

use ucx_rs::sys as ucp;
use ucx_rs::sys::{
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ARG as AM_HANDLER_ARG,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_CB as AM_HANDLER_CB,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_FLAGS as AM_HANDLER_FLAGS,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ID as AM_HANDLER_ID,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLER as EP_ERR_HANDLER,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE as EP_ERR_MODE,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS as EP_REMOTE_ADDRESS,
};

use super::{Context, Endpoint, Status, check};
use crate::part::{ADDRESS_SLACK, check_address};

/// The number under which all our active messages run.
pub(super) const AM_ID: u32 = 0x6b76;

/// Before each message: what it is, and for whom among those who share the worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: u8,
    pub(crate) to: [u8; 16],
}

impl Header {
    pub(super) const LEN: usize = 17;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [self.kind; Self::LEN];
        bytes[1..].copy_from_slice(&self.to);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, to) = bytes.split_first()?;
        Some(Self { kind: *kind, to: to.try_into().ok()? })
    }
}

type Inbox = RefCell<VecDeque<(Header, Vec<u8>)>>;

/// UCX calls this for each message.
unsafe extern "C" fn received(
    arg: *mut c_void,
    header: *const c_void,
    header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const ucp::ucp_am_recv_param_t,
) -> ucp::ucs_status_t {
    // SAFETY: UCX gives a valid parameter structure.
    let attr = unsafe { (*param).recv_attr };
    let rendezvous = u64::from(ucp::ucp_am_recv_attr_t_UCP_AM_RECV_ATTR_FLAG_RNDV);
    if header_len != Header::LEN || header.is_null() || attr & rendezvous != 0 {
        // Not one of ours; refused by not asking for the data.
        return ucp::ucs_status_t_UCS_OK;
    }
    // SAFETY: `header_len` bytes are at `header`, which isn't null, while this runs.
    let header = unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_len) };
    let body = if len == 0 || data.is_null() {
        Vec::new()
    } else {
        // SAFETY: without the rendezvous flag, `len` bytes of the message are at `data` while this runs.
        unsafe { std::slice::from_raw_parts(data.cast_const().cast::<u8>(), len) }.to_vec()
    };
    if let Some(header) = Header::decode(header) {
        // SAFETY: the argument is the worker's inbox, which outlives the worker; UCX calls only from inside of calls that the
        // rail's thread makes, and no borrow of the inbox is held during such a call.
        unsafe { &*arg.cast_const().cast::<Inbox>() }.borrow_mut().push_back((header, body));
    }
    ucp::ucs_status_t_UCS_OK
}

/// A worker: its endpoints, its progress, its messages.
pub(crate) struct Worker {
    raw: ucp::ucp_worker_h,
    // UCX holds its place.
    inbox: Rc<Inbox>,
    /// How many endpoints have failed.
    faults: Rc<Cell<u64>>,
    context: Rc<Context>,
}

impl Worker {
    pub(crate) fn new(context: &Rc<Context>) -> Result<Self, Status> {
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut params: ucp::ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(ucp::ucp_worker_params_field_UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = ucp::ucs_thread_mode_t_UCS_THREAD_MODE_SINGLE;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive, the parameters say which of their fields are set.
        check(unsafe { ucp::ucp_worker_create(context.0, &raw const params, &raw mut raw) })?;
        let inbox = Rc::new(Inbox::default());
        let worker = Self { raw, inbox, faults: Rc::default(), context: context.clone() };
        // SAFETY: as above.
        let mut handler: ucp::ucp_am_handler_param_t = unsafe { std::mem::zeroed() };
        handler.field_mask = u64::from(AM_HANDLER_ID | AM_HANDLER_FLAGS | AM_HANDLER_CB | AM_HANDLER_ARG);
        (handler.id, handler.flags) = (AM_ID, ucp::ucp_am_cb_flags_UCP_AM_FLAG_WHOLE_MSG);
        handler.cb = Some(received);
        handler.arg = Rc::as_ptr(&worker.inbox).cast_mut().cast();
        // SAFETY: the worker is alive; the inbox lives until after the worker is destroyed.
        check(unsafe { ucp::ucp_worker_set_am_recv_handler(raw, &raw const handler) })?;
        Ok(worker)
    }

    /// The descriptor that becomes readable when there is something to do, once [`arm`](Self::arm) has said so.
    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>, Status> {
        let mut fd: RawFd = -1;
        // SAFETY: the worker is alive and its context has the wakeup feature.
        check(unsafe { ucp::ucp_worker_get_efd(self.raw, &raw mut fd) })?;
        // SAFETY: the descriptor is the worker's, open while the worker lives; a negative one would have been an error.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Does some of what there is to do; whether it did anything.
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: the worker is alive, and this is not called from its callbacks, which touch counters and boxes only.
        unsafe { ucp::ucp_worker_progress(self.raw) != 0 }
    }

    /// Prepares for sleeping on the event descriptor; `Err(BUSY)` if there is something to do.
    pub(crate) fn arm(&self) -> Result<(), Status> {
        // SAFETY: the worker is alive.
        check(unsafe { ucp::ucp_worker_arm(self.raw) })
    }

    /// The next message, oldest first.
    pub(crate) fn receive(&self) -> Option<(Header, Vec<u8>)> {
        self.inbox.borrow_mut().pop_front()
    }

    /// How many endpoints have failed so far.
    pub(crate) fn faults(&self) -> u64 {
        self.faults.get()
    }

    /// Where others reach it.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Status> {
        let (mut address, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the worker is alive; the results are written to `address` and `len`.
        check(unsafe { ucp::ucp_worker_get_address(self.raw, &raw mut address, &raw mut len) })?;
        // SAFETY: on success UCX gives `len` bytes at `address`, ours until they are released.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: given above, released once.
        unsafe { ucp::ucp_worker_release_address(self.raw, address) };
        Ok(bytes)
    }

    /// An endpoint to the worker at this address; `Err(INVALID)` if its bytes don't pass [`check_address`].
    pub(crate) fn connect(&self, address: &[u8]) -> Result<Endpoint, Status> {
        check_address(address).map_err(|_| Status::INVALID)?;
        let mut padded = address.to_vec();
        padded.resize(address.len() + ADDRESS_SLACK, 0);
        let fault = Rc::new(Fault { status: Cell::new(None), faults: self.faults.clone() });
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut params: ucp::ucp_ep_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(EP_REMOTE_ADDRESS | EP_ERR_MODE | EP_ERR_HANDLER);
        params.address = padded.as_ptr().cast();
        params.err_mode = ucp::ucp_err_handling_mode_t_UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(faulted);
        params.err_handler.arg = Rc::as_ptr(&fault).cast_mut().cast();
        let mut raw = ptr::null_mut();
        // SAFETY: the worker is alive; the address bytes are valid during the call, and UCX's parser stays within them, as the
        // check has taken the same steps; the fault is kept until the endpoint is closed.
        check(unsafe { ucp::ucp_ep_create(self.raw, &raw const params, &raw mut raw) })?;
        Ok(Endpoint::new(raw, fault))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; UCX ends its endpoints with it. The context outlives it by the `Rc`.
        unsafe { ucp::ucp_worker_destroy(self.raw) };
        let _ = &self.context;
    }
}

/// Where UCX tells that an endpoint has failed.
pub(super) struct Fault {
    pub(super) status: Cell<Option<Status>>,
    faults: Rc<Cell<u64>>,
}

impl Fault {
    pub(super) fn tell(&self, status: Status) {
        self.status.set(self.status.get().or(Some(status)));
        self.faults.set(self.faults.get() + 1);
    }
}

/// UCX calls this when an endpoint has failed.
unsafe extern "C" fn faulted(arg: *mut c_void, _ep: ucp::ucp_ep_h, status: ucp::ucs_status_t) {
    // SAFETY: the argument is the fault of an endpoint that is not closed yet, so it is alive.
    let fault = unsafe { &*arg.cast_const().cast::<Fault>() };
    fault.tell(Status(status));
}
