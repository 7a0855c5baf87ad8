//! NIXL's C interface: the one place where it is called.
//!
//! The functions are those of `libnixl_capi.so`, declared here because the safe half of `nixl-sys` keeps its handles to itself, copies
//! each descriptor twice and folds statuses together. `nixl-sys` provides the symbols: its stubs open the library at run time,
//! and abort where it, or a symbol of it, is missing. So [`library`] asks for every symbol first, and an [`Agent`] can only be
//! made with what it returns.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr::{self, NonNull};

use kvferry_transport::OpKind;

use crate::error::NixlError;
use lists::RegList;
pub(crate) use lists::{List, Notifications, Request};
use notices::tell;

mod lists;
mod notices;

type Status = c_int;
type Handle = *mut c_void;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 1;
/// Host memory.
const DRAM: u32 = 0;

/// The configuration of an agent, as C has it.
#[repr(C)]
struct RawConfig {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: u32,
    num_workers: u32,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

/// What NIXL measured of a request.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct RawTelemetry {
    start_time_us: u64,
    pub(crate) post_duration_us: u64,
    pub(crate) xfer_duration_us: u64,
    total_bytes: u64,
    desc_count: u64,
}

macro_rules! declare {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        unsafe extern "C" {
            $(fn $name($($arg: $ty),*) -> Status;)*
        }
        /// All of them by name.
        const SYMBOLS: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}

declare! {
    nixl_capi_create_configured_agent(name: *const c_char, config: *const RawConfig, agent: *mut Handle);
    nixl_capi_destroy_agent(agent: Handle);
    nixl_capi_get_available_plugins(agent: Handle, plugins: *mut Handle);
    nixl_capi_destroy_string_list(list: Handle);
    nixl_capi_string_list_size(list: Handle, size: *mut usize);
    nixl_capi_string_list_get(list: Handle, index: usize, text: *mut *const c_char);
    nixl_capi_get_plugin_params(agent: Handle, plugin: *const c_char, mems: *mut Handle, params: *mut Handle);
    nixl_capi_mem_list_size(list: Handle, size: *mut usize);
    nixl_capi_mem_list_get(list: Handle, index: usize, kind: *mut u32);
    nixl_capi_destroy_mem_list(list: Handle);
    nixl_capi_create_params(params: *mut Handle);
    nixl_capi_params_add(params: Handle, key: *const c_char, value: *const c_char);
    nixl_capi_params_create_iterator(params: Handle, iter: *mut Handle);
    nixl_capi_params_iterator_next(iter: Handle, key: *mut *const c_char, value: *mut *const c_char, more: *mut bool);
    nixl_capi_params_destroy_iterator(iter: Handle);
    nixl_capi_destroy_params(params: Handle);
    nixl_capi_create_backend(agent: Handle, plugin: *const c_char, params: Handle, backend: *mut Handle);
    nixl_capi_destroy_backend(backend: Handle);
    nixl_capi_create_opt_args(args: *mut Handle);
    nixl_capi_destroy_opt_args(args: Handle);
    nixl_capi_opt_args_add_backend(args: Handle, backend: Handle);
    nixl_capi_opt_args_set_skip_desc_merge(args: Handle, skip: bool);
    nixl_capi_create_reg_dlist(kind: u32, list: *mut Handle);
    nixl_capi_destroy_reg_dlist(list: Handle);
    nixl_capi_reg_dlist_add_desc(
        list: Handle, addr: usize, len: usize, dev: u64, meta: *const c_void, meta_len: usize
    );
    nixl_capi_register_mem(agent: Handle, list: Handle, args: Handle);
    nixl_capi_deregister_mem(agent: Handle, list: Handle, args: Handle);
    nixl_capi_get_local_md(agent: Handle, data: *mut *mut c_void, len: *mut usize);
    nixl_capi_get_local_partial_md(agent: Handle, list: Handle, data: *mut *mut c_void, len: *mut usize, args: Handle);
    nixl_capi_load_remote_md(agent: Handle, data: *const c_void, len: usize, name: *mut *mut c_char);
    nixl_capi_invalidate_remote_md(agent: Handle, name: *const c_char);
    nixl_capi_gen_notif(agent: Handle, name: *const c_char, data: *const c_void, len: usize, args: Handle);
    nixl_capi_create_notif_map(map: *mut Handle);
    nixl_capi_destroy_notif_map(map: Handle);
    nixl_capi_notif_map_clear(map: Handle);
    nixl_capi_notif_map_size(map: Handle, size: *mut usize);
    nixl_capi_notif_map_get_agent_at(map: Handle, index: usize, name: *mut *const c_char);
    nixl_capi_notif_map_get_notifs_size(map: Handle, name: *const c_char, size: *mut usize);
    nixl_capi_notif_map_get_notif(
        map: Handle, name: *const c_char, index: usize, data: *mut *const c_void, len: *mut usize
    );
    nixl_capi_get_notifs(agent: Handle, map: Handle, args: Handle);
    nixl_capi_create_xfer_dlist(kind: u32, list: *mut Handle);
    nixl_capi_destroy_xfer_dlist(list: Handle);
    nixl_capi_xfer_dlist_clear(list: Handle);
    nixl_capi_xfer_dlist_add_desc(list: Handle, addr: usize, len: usize, dev: u64);
    nixl_capi_create_xfer_req(
        agent: Handle, kind: u32, local: Handle, remote: Handle, name: *const c_char, request: *mut Handle, args: Handle
    );
    nixl_capi_post_xfer_req(agent: Handle, request: Handle, args: Handle);
    nixl_capi_get_xfer_status(agent: Handle, request: Handle);
    nixl_capi_get_xfer_telemetry(agent: Handle, request: Handle, telemetry: *mut RawTelemetry);
    nixl_capi_release_xfer_req(agent: Handle, request: Handle);
    nixl_capi_destroy_xfer_req(request: Handle);
}

/// A call that failed, by its status. The C library folds most of NIXL's own statuses into `Backend`; the text that NIXL logs
/// says more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum Fail {
    #[error("an invalid parameter")]
    InvalidParam,
    #[error("an error of its backend, which NIXL logs")]
    Backend,
    #[error("an invalid state")]
    InvalidState,
    #[error("an exception")]
    Exception,
    #[error("no telemetry")]
    NoTelemetry,
    #[error("nothing found: the peer's metadata is gone, or no backend serves the request")]
    NotFound,
    #[error("status {0}")]
    Other(c_int),
}

fn check(status: Status) -> Result<(), Fail> {
    Err(match status {
        SUCCESS => return Ok(()),
        -1 => Fail::InvalidParam,
        -2 => Fail::Backend,
        -3 => Fail::InvalidState,
        -4 => Fail::Exception,
        -5 => Fail::NoTelemetry,
        -6 => Fail::NotFound,
        other => Fail::Other(other),
    })
}

/// What is behind a handle that a call gave.
fn handle(status: Status, raw: Handle) -> Result<NonNull<c_void>, Fail> {
    check(status)?;
    NonNull::new(raw).ok_or(Fail::InvalidState)
}

/// NIXL's library, opened and found complete.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    /// Where it was found.
    pub(crate) path: PathBuf,
}

/// Opens the library, or says what is missing.
pub(crate) fn library() -> Result<Library, NixlError> {
    const NAME: &CStr = c"libnixl_capi.so";
    // SAFETY: a constant path; loading runs the library's constructors, which is what the caller asks for. The handle is never closed,
    // as `nixl-sys` keeps its own for the life of the process.
    let opened = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if opened.is_null() || nixl_sys::is_stub() {
        // SAFETY: `dlerror` gives null or a text that is valid until the next call of the `dl` family on this thread.
        let text = unsafe { text(libc::dlerror()) };
        return Err(NixlError::no_library(text));
    }
    let mut path = PathBuf::from("libnixl_capi.so");
    for symbol in SYMBOLS {
        // SAFETY: the handle is open and the name ends with a zero, by the macro above.
        let found = unsafe { libc::dlsym(opened, symbol.as_ptr().cast()) };
        if found.is_null() {
            return Err(NixlError::OldLibrary { symbol: symbol.trim_end_matches('\0').to_owned() });
        }
        // SAFETY: a plain structure of integers and pointers, for which zeros are values.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is writable; `dladdr` fills it with texts that live as long as the library.
        if unsafe { libc::dladdr(found, &raw mut info) } != 0 && !info.dli_fname.is_null() {
            // SAFETY: as above.
            path = PathBuf::from(unsafe { text(info.dli_fname) });
        }
    }
    Ok(Library { path })
}

/// A C text, or "" for null.
///
/// # Safety
/// `raw` is null or a zero-terminated text that lives for the call.
unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

/// A text for C; what follows a zero in it is cut off.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().take_while(|b| *b != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// How an agent runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentConfig {
    /// The delay of NIXL's own progress thread in microseconds; `None` runs none.
    pub(crate) progress_us: Option<u64>,
    pub(crate) telemetry: bool,
}

/// What a plugin says of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plugin {
    /// Kinds of memory, by NIXL's numbers.
    pub(crate) memory: Vec<u32>,
    pub(crate) params: Vec<(String, String)>,
}

impl Plugin {
    pub(crate) fn has_host_memory(&self) -> bool {
        self.memory.contains(&DRAM)
    }

    /// Blocks, objects and files.
    pub(crate) fn has_storage(&self) -> bool {
        self.memory.iter().any(|kind| (2..=4).contains(kind))
    }

    pub(crate) fn memory_names(&self) -> String {
        const NAMES: [&str; 5] = ["DRAM", "VRAM", "BLOCK", "OBJECT", "FILE"];
        let name = |kind: &u32| usize::try_from(*kind).ok().and_then(|k| NAMES.get(k)).copied().unwrap_or("unknown");
        self.memory.iter().map(name).collect::<Vec<_>>().join(", ")
    }
}

/// An agent, with one backend once it was created. Belongs to one thread, which is what NIXL's mode without locks wants.
#[derive(Debug)]
pub(crate) struct Agent {
    raw: NonNull<c_void>,
    /// The wrapper of the backend's handle, not the backend itself, which is the agent's.
    backend: Option<NonNull<c_void>>,
    /// Names the backend, and skips the search for neighbours, which a batch's cursor has done.
    args: Option<NonNull<c_void>>,
}

impl Agent {
    pub(crate) fn new(_library: &Library, name: &CStr, config: AgentConfig) -> Result<Self, Fail> {
        let config = RawConfig {
            enable_prog_thread: config.progress_us.is_some(),
            enable_listen_thread: false,
            listen_port: 0,
            // One thread calls.
            thread_sync: 0,
            num_workers: 1,
            pthr_delay_us: config.progress_us.unwrap_or(0),
            lthr_delay_us: 100_000,
            capture_telemetry: config.telemetry,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: a zero-terminated name, a complete configuration and a place for the result, all alive for the call.
        let status = unsafe { nixl_capi_create_configured_agent(name.as_ptr(), &raw const config, &raw mut raw) };
        Ok(Self { raw: handle(status, raw)?, backend: None, args: None })
    }

    fn args(&self) -> Handle {
        self.args.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// The plugins that there are.
    pub(crate) fn plugins(&self) -> Result<Vec<String>, Fail> {
        let mut raw = ptr::null_mut();
        // SAFETY: the agent is alive, the result has a place.
        let list = handle(unsafe { nixl_capi_get_available_plugins(self.raw.as_ptr(), &raw mut raw) }, raw)?;
        let mut size = 0;
        // SAFETY: the list was just given to us and is destroyed only below.
        let mut status = unsafe { nixl_capi_string_list_size(list.as_ptr(), &raw mut size) };
        let mut out = Vec::new();
        for index in 0..size {
            let mut item = ptr::null();
            // SAFETY: as above, with an index below the size.
            status = unsafe { nixl_capi_string_list_get(list.as_ptr(), index, &raw mut item) };
            if status != SUCCESS {
                break;
            }
            // SAFETY: a text of the list, which is alive.
            out.push(unsafe { text(item) });
        }
        // SAFETY: destroyed once; nothing of it is used any more.
        unsafe { nixl_capi_destroy_string_list(list.as_ptr()) };
        check(status).map(|()| out)
    }

    /// What a plugin offers. Loads it.
    pub(crate) fn plugin(&self, name: &CStr) -> Result<Plugin, Fail> {
        let (mut mems, mut params) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the agent is alive, the name ends with a zero and the results have places.
        let status =
            unsafe { nixl_capi_get_plugin_params(self.raw.as_ptr(), name.as_ptr(), &raw mut mems, &raw mut params) };
        let mems = handle(status, mems)?;
        let mut plugin = Plugin::default();
        let mut size = 0;
        // SAFETY: the list was just given to us and is destroyed only below.
        if unsafe { nixl_capi_mem_list_size(mems.as_ptr(), &raw mut size) } == SUCCESS {
            for index in 0..size {
                let mut kind = u32::MAX;
                // SAFETY: as above, with an index below the size.
                if unsafe { nixl_capi_mem_list_get(mems.as_ptr(), index, &raw mut kind) } == SUCCESS {
                    plugin.memory.push(kind);
                }
            }
        }
        // SAFETY: destroyed once; nothing of it is used any more.
        unsafe { nixl_capi_destroy_mem_list(mems.as_ptr()) };
        if let Some(params) = NonNull::new(params) {
            plugin.params = read_params(params);
            // SAFETY: as for the list.
            unsafe { nixl_capi_destroy_params(params.as_ptr()) };
        }
        Ok(plugin)
    }

    /// Creates the agent's backend.
    pub(crate) fn create_backend(&mut self, plugin: &CStr, params: &[(String, String)]) -> Result<(), Fail> {
        let mut raw = ptr::null_mut();
        // SAFETY: the result has a place.
        let list = handle(unsafe { nixl_capi_create_params(&raw mut raw) }, raw)?;
        let mut status = SUCCESS;
        for (key, value) in params {
            let (key, value) = (c_text(key), c_text(value));
            // SAFETY: the list is alive; the texts end with zeros, live for the call and are copied by it.
            status = unsafe { nixl_capi_params_add(list.as_ptr(), key.as_ptr(), value.as_ptr()) };
            if status != SUCCESS {
                break;
            }
        }
        let mut backend = ptr::null_mut();
        if status == SUCCESS {
            // SAFETY: agent and list are alive, the name ends with a zero, the result has a place.
            status = unsafe {
                nixl_capi_create_backend(self.raw.as_ptr(), plugin.as_ptr(), list.as_ptr(), &raw mut backend)
            };
        }
        // SAFETY: destroyed once; the backend has its own copy.
        unsafe { nixl_capi_destroy_params(list.as_ptr()) };
        let backend = handle(status, backend)?;
        self.backend = Some(backend);
        let mut args = ptr::null_mut();
        // SAFETY: the result has a place.
        let args = handle(unsafe { nixl_capi_create_opt_args(&raw mut args) }, args)?;
        self.args = Some(args);
        // SAFETY: both were just given to us and live until the agent is dropped.
        check(unsafe { nixl_capi_opt_args_add_backend(args.as_ptr(), backend.as_ptr()) })?;
        // SAFETY: as above.
        check(unsafe { nixl_capi_opt_args_set_skip_desc_merge(args.as_ptr(), true) })
    }

    /// Registers host memory under a number of ours that tells it from any other registration.
    ///
    /// # Safety
    /// The memory must be mapped until it was deregistered, and no request that touches it may be in progress then.
    pub(crate) unsafe fn register(&self, addr: usize, len: usize, serial: u64) -> Result<(), Fail> {
        let list = RegList::one(addr, len, serial)?;
        // SAFETY: agent, list and arguments are alive; the memory is the caller's promise.
        check(unsafe { nixl_capi_register_mem(self.raw.as_ptr(), list.0.as_ptr(), self.args()) })
    }

    /// Ends a registration.
    pub(crate) fn deregister(&self, addr: usize, len: usize, serial: u64) -> Result<(), Fail> {
        let list = RegList::one(addr, len, serial)?;
        // SAFETY: agent, list and arguments are alive; a range that is not registered is refused.
        check(unsafe { nixl_capi_deregister_mem(self.raw.as_ptr(), list.0.as_ptr(), self.args()) })
    }

    /// What a peer must know to reach this agent and its memory.
    pub(crate) fn metadata(&self) -> Result<Vec<u8>, Fail> {
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the agent is alive, the results have places.
        let status = unsafe { nixl_capi_get_local_md(self.raw.as_ptr(), &raw mut data, &raw mut len) };
        // SAFETY: what a success gives is ours, by the call's contract.
        unsafe { take_bytes(status, data, len) }
    }

    /// What a peer must know to reach this agent, without its memory.
    pub(crate) fn connection_metadata(&self) -> Result<Vec<u8>, Fail> {
        let list = RegList::empty()?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: agent, list and arguments are alive, the results have places.
        let status = unsafe {
            nixl_capi_get_local_partial_md(self.raw.as_ptr(), list.0.as_ptr(), &raw mut data, &raw mut len, self.args())
        };
        // SAFETY: what a success gives is ours, by the call's contract.
        unsafe { take_bytes(status, data, len) }
    }

    /// Makes a peer known, or more of its memory.
    pub(crate) fn load(&self, metadata: &[u8]) -> Result<(), Fail> {
        let mut name = ptr::null_mut();
        // SAFETY: the agent is alive, the bytes live for the call, the result has a place.
        let status = unsafe {
            nixl_capi_load_remote_md(self.raw.as_ptr(), metadata.as_ptr().cast(), metadata.len(), &raw mut name)
        };
        check(status)?;
        // SAFETY: a success gives a text from `malloc`, or null, that is ours.
        unsafe { libc::free(name.cast()) };
        Ok(())
    }

    /// Forgets a peer: its endpoint is closed.
    pub(crate) fn forget(&self, name: &CStr) -> Result<(), Fail> {
        // SAFETY: the agent is alive, the name ends with a zero.
        check(unsafe { nixl_capi_invalidate_remote_md(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Sends bytes to a peer. They are copied.
    pub(crate) fn notify(&self, name: &CStr, bytes: &[u8]) -> Result<(), Fail> {
        // SAFETY: agent and arguments are alive, the name ends with a zero, the bytes live for the call.
        check(unsafe {
            nixl_capi_gen_notif(self.raw.as_ptr(), name.as_ptr(), bytes.as_ptr().cast(), bytes.len(), self.args())
        })
    }

    /// Makes progress and takes what peers sent: each sender's name and bytes.
    ///
    /// Nothing stays in the map, whatever happens: NIXL adds to what is there, so what stayed would be told again each time.
    pub(crate) fn notifications(&self, map: &mut Notifications, each: impl FnMut(&CStr, &[u8])) -> Result<(), Fail> {
        // SAFETY: agent, map and arguments are alive.
        let got = check(unsafe { nixl_capi_get_notifs(self.raw.as_ptr(), map.0.as_ptr(), self.args()) });
        if tell(map, each) > 0 || got.is_err() {
            map.clear()?;
        }
        got
    }

    /// Makes a request of two lists of the same lengths.
    pub(crate) fn request(&self, kind: OpKind, local: &List, remote: &List, peer: &CStr) -> Result<Request, Fail> {
        let kind = u32::from(kind == OpKind::Write);
        let mut raw = ptr::null_mut();
        // SAFETY: agent, lists and arguments are alive, the name ends with a zero, the result has a place.
        let status = unsafe {
            nixl_capi_create_xfer_req(
                self.raw.as_ptr(),
                kind,
                local.0.as_ptr(),
                remote.0.as_ptr(),
                peer.as_ptr(),
                &raw mut raw,
                self.args(),
            )
        };
        handle(status, raw).map(Request)
    }

    /// Posts a request; whether it is done already.
    ///
    /// # Safety
    /// Both sides' memory must stay what it is until the request has ended: ours mapped, and free to be written for a read.
    pub(crate) unsafe fn post(&self, request: &Request) -> Result<bool, Fail> {
        // SAFETY: agent and request are alive; the memory is the caller's promise.
        ended(unsafe { nixl_capi_post_xfer_req(self.raw.as_ptr(), request.0.as_ptr(), ptr::null_mut()) })
    }

    /// Makes progress; whether a request is done.
    pub(crate) fn poll(&self, request: &Request) -> Result<bool, Fail> {
        // SAFETY: agent and request are alive.
        ended(unsafe { nixl_capi_get_xfer_status(self.raw.as_ptr(), request.0.as_ptr()) })
    }

    /// What was measured of a request that is done.
    pub(crate) fn telemetry(&self, request: &Request) -> Result<RawTelemetry, Fail> {
        let mut out = RawTelemetry::default();
        // SAFETY: agent and request are alive, the result has a place.
        check(unsafe { nixl_capi_get_xfer_telemetry(self.raw.as_ptr(), request.0.as_ptr(), &raw mut out) })?;
        Ok(out)
    }

    /// Gives a request back. One that is in progress is asked to stop first, and nothing tells when it has.
    pub(crate) fn release(&self, request: Request) {
        // SAFETY: agent and request are alive; the request is not used afterwards.
        unsafe {
            nixl_capi_release_xfer_req(self.raw.as_ptr(), request.0.as_ptr());
            nixl_capi_destroy_xfer_req(request.0.as_ptr());
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: each was given to us, is destroyed once and not used afterwards; the agent destroys its backend itself.
        unsafe {
            if let Some(args) = self.args {
                nixl_capi_destroy_opt_args(args.as_ptr());
            }
            if let Some(backend) = self.backend {
                nixl_capi_destroy_backend(backend.as_ptr());
            }
            nixl_capi_destroy_agent(self.raw.as_ptr());
        }
    }
}

/// Whether a request has ended, by its status.
fn ended(status: Status) -> Result<bool, Fail> {
    if status == IN_PROGRESS { Ok(false) } else { check(status).map(|()| true) }
}

fn read_params(params: NonNull<c_void>) -> Vec<(String, String)> {
    let mut raw = ptr::null_mut();
    let mut out = Vec::new();
    // SAFETY: the parameters are alive, the result has a place.
    let Ok(iter) = handle(unsafe { nixl_capi_params_create_iterator(params.as_ptr(), &raw mut raw) }, raw) else {
        return out;
    };
    loop {
        let (mut key, mut value, mut more) = (ptr::null(), ptr::null(), false);
        // SAFETY: the iterator is alive, the results have places.
        let status =
            unsafe { nixl_capi_params_iterator_next(iter.as_ptr(), &raw mut key, &raw mut value, &raw mut more) };
        if status != SUCCESS || key.is_null() {
            break;
        }
        // SAFETY: texts of the iterator, which live until its next step.
        out.push(unsafe { (text(key), text(value)) });
        if !more {
            break;
        }
    }
    // SAFETY: destroyed once; nothing of it is used any more.
    unsafe { nixl_capi_params_destroy_iterator(iter.as_ptr()) };
    out
}

/// Bytes that a call allocated for us.
///
/// # Safety
/// If `status` is a success, `data` is null or points to `len` bytes from `malloc` that are ours.
unsafe fn take_bytes(status: Status, data: *mut c_void, len: usize) -> Result<Vec<u8>, Fail> {
    let data = handle(status, data)?;
    // SAFETY: the caller's promise; copied, and freed once.
    unsafe {
        let bytes = std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), len).to_vec();
        libc::free(data.as_ptr());
        Ok(bytes)
    }
}
