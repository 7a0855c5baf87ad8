//! Thin owners of UCX's handles: what is unsafe about the library is argued here and in `rail::run`, nowhere else.
//!
//! None of these types is `Send`: a rail's thread makes them, uses them and drops them. UCX wants the order kept in which
//! they go (remote keys and memory before the worker's context, endpoints before their worker); the rail's thread
//! sees to it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use ucx_rs::sys as ucp;
use ucx_rs::sys::{
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ARG as AM_HANDLER_ARG,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_CB as AM_HANDLER_CB,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_FLAGS as AM_HANDLER_FLAGS,
    ucp_am_handler_param_field_UCP_AM_HANDLER_PARAM_FIELD_ID as AM_HANDLER_ID,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLER as EP_ERR_HANDLER,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE as EP_ERR_MODE,
    ucp_ep_params_field_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS as EP_REMOTE_ADDRESS,
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS as MAP_ADDRESS,
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH as MAP_LENGTH,
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE as MAP_MEMORY_TYPE,
    ucp_op_attr_t_UCP_OP_ATTR_FIELD_CALLBACK as OP_CALLBACK, ucp_op_attr_t_UCP_OP_ATTR_FIELD_FLAGS as OP_FLAGS,
    ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMH as OP_MEMH, ucp_op_attr_t_UCP_OP_ATTR_FIELD_USER_DATA as OP_USER_DATA,
};

use crate::part::{ADDRESS_SLACK, KEY_SLACK, check_address, check_key};

/// The number under which all our active messages run.
const AM_ID: u32 = 0x6b76;

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

fn check(status: ucp::ucs_status_t) -> Result<(), Status> {
    if status == ucp::ucs_status_t_UCS_OK { Ok(()) } else { Err(Status(status)) }
}

/// What a call that may go on later has returned.
enum Posted {
    Done,
    Failed(Status),
    Later(NonNull<c_void>),
}

fn posted(returned: *mut c_void) -> Posted {
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

/// Why there is no context.
#[derive(Debug)]
pub(crate) enum ContextError {
    /// This option was refused.
    Option(String, Status),
    Init(Status),
}

/// UCX's settings, its memory registrations and its devices.
#[derive(Debug)]
pub(crate) struct Context(ucp::ucp_context_h);

impl Context {
    /// `soft` options are skipped where this UCX doesn't know them.
    pub(crate) fn new(soft: &[(&str, String)], hard: &[(String, String)]) -> Result<Rc<Self>, ContextError> {
        // Some settings are of the whole process, and UCX doesn't guard them.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut config = ptr::null_mut();
        // SAFETY: both names may be null; the result is written to `config`.
        check(unsafe { ucp::ucp_config_read(ptr::null(), ptr::null(), &raw mut config) })
            .map_err(ContextError::Init)?;
        let set = |name: &str, value: &str| {
            let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else { return Err(Status::INVALID) };
            // SAFETY: `config` was read above and is not released yet; both strings end with a zero.
            check(unsafe { ucp::ucp_config_modify(config, name.as_ptr(), value.as_ptr()) })
        };
        let mut refused = None;
        for (name, value) in soft {
            if let Err(status) = set(name, value)
                && status != Status::INVALID
            {
                refused.get_or_insert(ContextError::Option((*name).to_owned(), status));
            }
        }
        for (name, value) in hard {
            if let Err(status) = set(name, value) {
                refused.get_or_insert(ContextError::Option(format!("{name}={value}"), status));
            }
        }
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut params: ucp::ucp_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(ucp::ucp_params_field_UCP_PARAM_FIELD_FEATURES);
        params.features = u64::from(
            ucp::ucp_feature_UCP_FEATURE_RMA | ucp::ucp_feature_UCP_FEATURE_AM | ucp::ucp_feature_UCP_FEATURE_WAKEUP,
        );
        let mut raw = ptr::null_mut();
        let made = match refused {
            Some(error) => Err(error),
            // SAFETY: the parameters say which of their fields are set, `config` is valid, the result goes to `raw`.
            None => check(unsafe {
                ucp::ucp_init_version(ucp::UCP_API_MAJOR, ucp::UCP_API_MINOR, &raw const params, config, &raw mut raw)
            })
            .map_err(ContextError::Init),
        };
        // SAFETY: read above, released once.
        unsafe { ucp::ucp_config_release(config) };
        made.map(|()| Rc::new(Self(raw)))
    }

    /// Registers `len` bytes of host memory at `start`.
    ///
    /// # Safety
    /// They must stay mapped until the result is dropped.
    pub(crate) unsafe fn map(self: &Rc<Self>, start: *mut u8, len: usize) -> Result<Memory, Status> {
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut params: ucp::ucp_mem_map_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(MAP_ADDRESS | MAP_LENGTH | MAP_MEMORY_TYPE);
        (params.address, params.length) = (start.cast(), len);
        params.memory_type = ucp::ucs_memory_type_UCS_MEMORY_TYPE_HOST;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive, the parameters say which of their fields are set.
        check(unsafe { ucp::ucp_mem_map(self.0, &raw const params, &raw mut raw) })?;
        Ok(Memory { raw, context: self.clone() })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made in `new`; workers and memory hold an `Rc` of it, so they are gone.
        unsafe { ucp::ucp_cleanup(self.0) };
    }
}

/// Registered memory of ours.
#[derive(Debug)]
pub(crate) struct Memory {
    raw: ucp::ucp_mem_h,
    context: Rc<Context>,
}

impl Memory {
    /// What a peer needs to touch it.
    pub(crate) fn pack(&self) -> Result<Vec<u8>, Status> {
        let (mut buffer, mut len) = (ptr::null_mut(), 0);
        // SAFETY: context and memory are alive; the results are written to `buffer` and `len`.
        check(unsafe { ucp::ucp_rkey_pack(self.context.0, self.raw, &raw mut buffer, &raw mut len) })?;
        // SAFETY: on success UCX gives `len` bytes at `buffer`, ours until they are released.
        let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec();
        // SAFETY: packed above, released once.
        unsafe { ucp::ucp_rkey_buffer_release(buffer) };
        Ok(key)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, unmapped once. An error would mean that it wasn't mapped.
        unsafe { ucp::ucp_mem_unmap(self.context.0, self.raw) };
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

    fn begin(&self) {
        self.outstanding.set(self.outstanding.get() + 1);
        self.rail.set(self.rail.get() + 1);
    }

    fn end(&self) {
        self.outstanding.set(self.outstanding.get() - 1);
        self.rail.set(self.rail.get() - 1);
    }

    fn fail(&self, status: Status) {
        self.failed.set(self.failed.get().or(Some(status)));
    }
}

/// UCX calls this when an operation counted by a [`Tally`] has ended.
unsafe extern "C" fn tallied(request: *mut c_void, status: ucp::ucs_status_t, user_data: *mut c_void) {
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

/// A message under way.
struct Letter {
    header: [u8; Header::LEN],
    body: Vec<u8>,
    /// Of its endpoint.
    fault: Rc<Fault>,
}

/// UCX calls this when a message needs its bytes no more.
unsafe extern "C" fn sent(request: *mut c_void, status: ucp::ucs_status_t, user_data: *mut c_void) {
    // SAFETY: the user data is the box that `Endpoint::send` gave away for this request.
    let letter = unsafe { Box::from_raw(user_data.cast::<Letter>()) };
    // Somebody waits for the answer to what didn't arrive: with one message lost, the endpoint is.
    if let Err(status) = check(status) {
        letter.fault.tell(status);
    }
    drop(letter);
    // SAFETY: the request is complete and nobody else frees it.
    unsafe { ucp::ucp_request_free(request) };
}

/// Before each message: what it is, and for whom among those who share the worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: u8,
    pub(crate) to: [u8; 16],
}

impl Header {
    const LEN: usize = 17;

    fn encode(self) -> [u8; Self::LEN] {
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
        Ok(Endpoint { raw, fault })
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
struct Fault {
    status: Cell<Option<Status>>,
    faults: Rc<Cell<u64>>,
}

impl Fault {
    fn tell(&self, status: Status) {
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

/// A way to a peer's worker. Must be [closed](Self::close); otherwise it lasts as long as its worker.
pub(crate) struct Endpoint {
    raw: ucp::ucp_ep_h,
    fault: Rc<Fault>,
}

impl Endpoint {
    /// Why it failed, if it did.
    pub(crate) fn failed(&self) -> Option<Status> {
        self.fault.status.get()
    }

    /// Sends a message. It is whole at the receiver or not there; messages on one endpoint may overtake each other.
    pub(crate) fn send(&self, header: Header, body: Vec<u8>) -> Result<(), Status> {
        if let Some(status) = self.failed() {
            return Err(status);
        }
        let letter = Box::new(Letter { header: header.encode(), body, fault: self.fault.clone() });
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut param: ucp::ucp_request_param_t = unsafe { std::mem::zeroed() };
        param.op_attr_mask = OP_CALLBACK | OP_USER_DATA | OP_FLAGS;
        // Eager, so that the receiver has it at once and nothing of ours is read by the peer later.
        param.flags = ucp::ucp_send_am_flags_UCP_AM_SEND_FLAG_EAGER;
        param.cb.send = Some(sent);
        let letter = Box::into_raw(letter);
        param.user_data = letter.cast();
        // SAFETY: the endpoint is open; the letter is ours until it is given to the callback, and its bytes stay where they
        // are until then.
        let returned = unsafe {
            let (header, body) = (&raw const (*letter).header, &(*letter).body);
            let (data, len) = (body.as_ptr(), body.len());
            ucp::ucp_am_send_nbx(self.raw, AM_ID, header.cast(), Header::LEN, data.cast(), len, &raw const param)
        };
        match posted(returned) {
            Posted::Later(_) => Ok(()),
            Posted::Done => {
                // SAFETY: the call is over and will not call back, so the letter is ours again.
                drop(unsafe { Box::from_raw(letter) });
                Ok(())
            }
            Posted::Failed(status) => {
                // SAFETY: as above.
                drop(unsafe { Box::from_raw(letter) });
                Err(status)
            }
        }
    }

    /// Reads from the peer: `len` bytes at `remote` to `local`. They are there once the tally has ended
    /// (`ucp_get_nbx`: complete when the data is in the local buffer).
    ///
    /// # Safety
    /// The local bytes must be writable, registered as `memory`, and remain so until the tally has ended; so must `key` live.
    pub(crate) unsafe fn get(
        &self,
        (local, len): (*mut u8, usize),
        memory: &Memory,
        (remote, key): (u64, &RemoteKey),
        tally: &Rc<Tally>,
    ) {
        let param = tally_param(tally, Some(memory));
        // SAFETY: the endpoint is open; the caller vouches for the bytes; UCX calls back once or returns at once.
        let returned = unsafe { ucp::ucp_get_nbx(self.raw, local.cast(), len, remote, key.0, &raw const param) };
        settle(returned, tally);
    }

    /// Writes to the peer: `len` bytes at `local` to `remote`. They are there once a [`flush`](Self::flush) that was posted
    /// afterwards has ended.
    ///
    /// # Safety
    /// As for [`get`](Self::get), with readable bytes.
    pub(crate) unsafe fn put(
        &self,
        (local, len): (*const u8, usize),
        memory: &Memory,
        (remote, key): (u64, &RemoteKey),
        tally: &Rc<Tally>,
    ) {
        let param = tally_param(tally, Some(memory));
        // SAFETY: as in `get`.
        let returned = unsafe { ucp::ucp_put_nbx(self.raw, local.cast(), len, remote, key.0, &raw const param) };
        settle(returned, tally);
    }

    /// Ends when all reads and writes posted before it are complete at both ends (`ucp_ep_flush_nbx`).
    pub(crate) fn flush(&self, tally: &Rc<Tally>) {
        let param = tally_param(tally, None);
        // SAFETY: the endpoint is open; UCX calls back once or returns at once.
        let returned = unsafe { ucp::ucp_ep_flush_nbx(self.raw, &raw const param) };
        settle(returned, tally);
    }

    /// The transports of its lanes, each with its device.
    pub(crate) fn transports(&self) -> Vec<(String, String)> {
        const MOST: u32 = 64;
        let empty = ucp::ucp_transport_entry_t { transport_name: ptr::null(), device_name: ptr::null() };
        let mut entries = [empty; MOST as usize];
        // SAFETY: an all-zero attribute structure is one that asks for nothing.
        let mut attr: ucp::ucp_ep_attr_t = unsafe { std::mem::zeroed() };
        attr.field_mask = u64::from(ucp::ucp_ep_attr_field_UCP_EP_ATTR_FIELD_TRANSPORTS);
        attr.transports.entries = entries.as_mut_ptr();
        (attr.transports.num_entries, attr.transports.entry_size) = (MOST, size_of_val(&empty));
        // SAFETY: the endpoint is open; room for `num_entries` entries of the size given is at `entries`.
        if unsafe { ucp::ucp_ep_query(self.raw, &raw mut attr) } != ucp::ucs_status_t_UCS_OK {
            return Vec::new();
        }
        let filled = usize::try_from(attr.transports.num_entries).unwrap_or(0);
        entries.iter().take(filled).map(|e| (text(e.transport_name), text(e.device_name))).collect()
    }

    /// What UCX prints of it: the lanes and what each is for.
    pub(crate) fn info(&self) -> String {
        let (mut buffer, mut len) = (ptr::null_mut::<libc::c_char>(), 0usize);
        // SAFETY: both places outlive the stream, which is closed below.
        let stream = unsafe { libc::open_memstream(&raw mut buffer, &raw mut len) };
        if stream.is_null() {
            return String::new();
        }
        // SAFETY: the endpoint is open, and so is the stream; UCX's `FILE` is that of the C library.
        unsafe { ucp::ucp_ep_print_info(self.raw, stream.cast()) };
        // SAFETY: opened above, closed once; after that `buffer` has `len` bytes, which are ours.
        unsafe { libc::fclose(stream) };
        if buffer.is_null() {
            return String::new();
        }
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast_const().cast::<u8>(), len) };
        let info = String::from_utf8_lossy(bytes).into_owned();
        // SAFETY: `open_memstream` allocated it with `malloc`; freed once.
        unsafe { libc::free(buffer.cast()) };
        info
    }

    /// Unpacks a key for memory of the peer; `Err(INVALID)` if its bytes don't pass [`check_key`].
    pub(crate) fn unpack(&self, key: &[u8]) -> Result<RemoteKey, Status> {
        check_key(key).map_err(|_| Status::INVALID)?;
        let padded = [key, &KEY_SLACK].concat();
        let mut raw = ptr::null_mut();
        // SAFETY: the endpoint is open; the bytes are valid during the call, and UCX's parser stays within them, as the check
        // has taken the same steps.
        check(unsafe { ucp::ucp_ep_rkey_unpack(self.raw, padded.as_ptr().cast(), &raw mut raw) })?;
        Ok(RemoteKey(raw))
    }

    /// Closes it: after what was posted has ended, or at once if `force`.
    pub(crate) fn close(self, force: bool) -> Closing {
        let mut closing = Closing { endpoint: None, flushed: Tally::new(Rc::default()), request: None, fault: None };
        if force {
            closing.discard(self);
        } else {
            self.flush(&closing.flushed);
            closing.endpoint = Some(self);
        }
        closing
    }
}

/// Takes a tally into account for what a call returned that was given [`tally_param`].
fn settle(returned: *mut c_void, tally: &Rc<Tally>) {
    let give_back = || {
        // SAFETY: `tally_param` gave away one count for a callback that will not come.
        drop(unsafe { Rc::from_raw(Rc::as_ptr(tally)) });
        tally.end();
    };
    match posted(returned) {
        Posted::Later(_) => {}
        Posted::Done => give_back(),
        Posted::Failed(status) => {
            tally.fail(status);
            give_back();
        }
    }
}

/// Parameters of an operation that a tally counts from now on.
fn tally_param(tally: &Rc<Tally>, memory: Option<&Memory>) -> ucp::ucp_request_param_t {
    tally.begin();
    // SAFETY: an all-zero parameter structure is one with no field set.
    let mut param: ucp::ucp_request_param_t = unsafe { std::mem::zeroed() };
    param.op_attr_mask = OP_CALLBACK | OP_USER_DATA;
    param.cb.send = Some(tallied);
    param.user_data = Rc::into_raw(tally.clone()).cast_mut().cast();
    if let Some(memory) = memory {
        param.op_attr_mask |= OP_MEMH;
        param.memh = memory.raw;
    }
    param
}

fn text(raw: *const libc::c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: UCX gives strings that end with a zero and live as long as its context.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

/// A key to a peer's memory.
pub(crate) struct RemoteKey(ucp::ucp_rkey_h);

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: unpacked in `Endpoint::unpack`, destroyed once, before its worker.
        unsafe { ucp::ucp_rkey_destroy(self.0) };
    }
}

/// An endpoint that is being closed.
///
/// UCX has a polite way of its own, which keeps the endpoint until the worker goes (1.22: "TODO negotiate disconnect"). So what
/// was posted is flushed, and then the endpoint is discarded.
pub(crate) struct Closing {
    endpoint: Option<Endpoint>,
    flushed: Rc<Tally>,
    request: Option<NonNull<c_void>>,
    fault: Option<Rc<Fault>>,
}

impl Closing {
    /// Whether it is closed; goes on with it.
    pub(crate) fn done(&mut self) -> bool {
        if self.flushed.outstanding() == 0
            && let Some(endpoint) = self.endpoint.take()
        {
            self.discard(endpoint);
        }
        // SAFETY: the request is freed only when this value goes.
        let gone = |request: NonNull<c_void>| unsafe {
            ucp::ucp_request_check_status(request.as_ptr()) != ucp::ucs_status_t_UCS_INPROGRESS
        };
        self.endpoint.is_none() && self.request.is_none_or(gone)
    }

    /// Waits no longer for what was posted.
    pub(crate) fn force(&mut self) {
        let endpoint = self.endpoint.take();
        endpoint.into_iter().for_each(|endpoint| self.discard(endpoint));
    }

    fn discard(&mut self, endpoint: Endpoint) {
        // SAFETY: an all-zero parameter structure is one with no field set.
        let mut param: ucp::ucp_request_param_t = unsafe { std::mem::zeroed() };
        param.op_attr_mask = OP_FLAGS;
        param.flags = ucp::ucp_ep_close_flags_t_UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: the endpoint is open and not used after this call, which takes it.
        let returned = unsafe { ucp::ucp_ep_close_nbx(endpoint.raw, &raw const param) };
        if let Posted::Later(request) = posted(returned) {
            self.request = Some(request);
        }
        self.fault = Some(endpoint.fault);
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            // SAFETY: freed once; UCX releases the request itself when it completes later.
            unsafe { ucp::ucp_request_free(request.as_ptr()) };
        }
    }
}
