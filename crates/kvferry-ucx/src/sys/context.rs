//! Contexts and the memory registered with them.

use std::ffi::CString;
use std::ptr;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use ucx_rs::sys as ucp;
use ucx_rs::sys::{
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS as MAP_ADDRESS,
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH as MAP_LENGTH,
    ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE as MAP_MEMORY_TYPE,
};

use super::{Status, check};

/// Why there is no context.
#[derive(Debug)]
pub(crate) enum ContextError {
    /// This option was refused.
    Option(String, Status),
    Init(Status),
}

/// UCX's settings, its memory registrations and its devices.
#[derive(Debug)]
pub(crate) struct Context(pub(super) ucp::ucp_context_h);

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
    pub(super) raw: ucp::ucp_mem_h,
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
