//! Endpoints: what is sent, read and written, and how they end.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;

use ucx_rs::sys as ucp;
use ucx_rs::sys::{
    ucp_op_attr_t_UCP_OP_ATTR_FIELD_CALLBACK as OP_CALLBACK, ucp_op_attr_t_UCP_OP_ATTR_FIELD_FLAGS as OP_FLAGS,
    ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMH as OP_MEMH, ucp_op_attr_t_UCP_OP_ATTR_FIELD_USER_DATA as OP_USER_DATA,
};

use super::worker::{AM_ID, Fault};
use super::{Header, Memory, Posted, Status, Tally, check, posted, tallied};
use crate::part::{KEY_SLACK, check_key};

/// A way to a peer's worker. Must be [closed](Self::close); otherwise it lasts as long as its worker.
pub(crate) struct Endpoint {
    raw: ucp::ucp_ep_h,
    fault: Rc<Fault>,
}

impl Endpoint {
    pub(super) fn new(raw: ucp::ucp_ep_h, fault: Rc<Fault>) -> Self {
        Self { raw, fault }
    }

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

/// A key to a peer's memory. It should go before its endpoint, but may go later where operations that use it are still under way: UCX
/// takes it apart without looking at the endpoint (1.22, `ucp_rkey_destroy`).
pub(crate) struct RemoteKey(ucp::ucp_rkey_h);

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: unpacked in `Endpoint::unpack`, destroyed once, before its worker.
        unsafe { ucp::ucp_rkey_destroy(self.0) };
    }
}

/// An endpoint that is being closed.
///
/// UCX has a polite way of its own, which keeps the endpoint until the worker goes (1.22 negotiates no disconnect). So what
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
