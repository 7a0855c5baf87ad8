//! UCX as it comes: a loop of `ucp_get_nbx`, a window of them outstanding, as `ucx_perftest` does it. No notifications, no
//! leases, no error handling; what one pays for those is what the rows beside it show.

use std::collections::VecDeque;
use std::mem::zeroed;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kvferry_geometry::batch::Descriptor;
use kvferry_transport::Region;
use rustix::event::epoll;
use ucx_rs::sys;

use crate::child::{Memory, Steps, is_source};
use crate::wire::{Contact, Moved, Side};
use crate::work::Work;

/// Reads outstanding on a worker. Beyond 16 nothing changes here.
const WINDOW: usize = 64;

/// What a reader must know of a rail of the source: its worker's address, and base and key of each region.
type Hello = (Vec<u8>, Vec<(u64, Vec<u8>)>);

fn ok(what: &str, status: sys::ucs_status_t) -> anyhow::Result<()> {
    ensure!(status == sys::ucs_status_t_UCS_OK, "{what}: {}", ucx_rs::status_string(status));
    Ok(())
}

/// A context, a worker, the own regions registered, and an endpoint to the source, if this is a reader.
struct Rail {
    context: sys::ucp_context_h,
    worker: sys::ucp_worker_h,
    regions: Vec<(usize, sys::ucp_mem_h)>,
    peer: Option<(sys::ucp_ep_h, Vec<(u64, sys::ucp_rkey_h)>)>,
}

// SAFETY: UCX binds nothing of it to a thread, and `&mut` keeps it to one thread at a time, as the worker's thread mode asks.
unsafe impl Send for Rail {}

impl Rail {
    fn open() -> anyhow::Result<Self> {
        // SAFETY: these structures are plain numbers and pointers, for which zero is a value; the masks say which fields are
        // read. The handles are used only if the calls succeeded.
        unsafe {
            let mut params: sys::ucp_params_t = zeroed();
            params.field_mask = u64::from(sys::ucp_params_field_UCP_PARAM_FIELD_FEATURES);
            params.features = u64::from(sys::ucp_feature_UCP_FEATURE_RMA | sys::ucp_feature_UCP_FEATURE_WAKEUP);
            let mut context = std::ptr::null_mut();
            let (major, minor) = (sys::UCP_API_MAJOR, sys::UCP_API_MINOR);
            ok("ucp_init", sys::ucp_init_version(major, minor, &raw const params, std::ptr::null(), &raw mut context))?;
            let mut params: sys::ucp_worker_params_t = zeroed();
            params.field_mask = u64::from(sys::ucp_worker_params_field_UCP_WORKER_PARAM_FIELD_THREAD_MODE);
            params.thread_mode = sys::ucs_thread_mode_t_UCS_THREAD_MODE_SERIALIZED;
            let mut worker = std::ptr::null_mut();
            ok("ucp_worker_create", sys::ucp_worker_create(context, &raw const params, &raw mut worker))?;
            Ok(Self { context, worker, regions: Vec::new(), peer: None })
        }
    }

    fn register(&mut self, regions: &[Region]) -> anyhow::Result<()> {
        for region in regions {
            // SAFETY: as in `open`; the region stays mapped as long as the process lives.
            unsafe {
                let mut params: sys::ucp_mem_map_params_t = zeroed();
                params.field_mask = u64::from(
                    sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                        | sys::ucp_mem_map_params_field_UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                );
                params.address = region.as_ptr().cast();
                params.length = usize::try_from(region.len().get())?;
                let mut memh = std::ptr::null_mut();
                ok("ucp_mem_map", sys::ucp_mem_map(self.context, &raw const params, &raw mut memh))?;
                self.regions.push((region.address(), memh));
            }
        }
        Ok(())
    }

    fn hello(&self) -> anyhow::Result<Hello> {
        let mut keys = Vec::new();
        // SAFETY: the handles are this rail's own and alive; each buffer is copied as long as UCX said it is, and released once.
        unsafe {
            for &(base, memh) in &self.regions {
                let (mut buffer, mut len) = (std::ptr::null_mut(), 0);
                ok("ucp_rkey_pack", sys::ucp_rkey_pack(self.context, memh, &raw mut buffer, &raw mut len))?;
                keys.push((base as u64, std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec()));
                sys::ucp_rkey_buffer_release(buffer);
            }
            let (mut address, mut len) = (std::ptr::null_mut(), 0);
            ok("ucp_worker_get_address", sys::ucp_worker_get_address(self.worker, &raw mut address, &raw mut len))?;
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            sys::ucp_worker_release_address(self.worker, address);
            Ok((bytes, keys))
        }
    }

    fn connect(&mut self, (address, keys): &Hello) -> anyhow::Result<()> {
        // SAFETY: address and keys are a source's own words, unchanged; UCX copies them. As in `open` for the rest.
        unsafe {
            let mut params: sys::ucp_ep_params_t = zeroed();
            params.field_mask = u64::from(sys::ucp_ep_params_field_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
            params.address = address.as_ptr().cast();
            let mut ep = std::ptr::null_mut();
            ok("ucp_ep_create", sys::ucp_ep_create(self.worker, &raw const params, &raw mut ep))?;
            let mut unpacked = Vec::new();
            for (base, key) in keys {
                let mut rkey = std::ptr::null_mut();
                ok("ucp_ep_rkey_unpack", sys::ucp_ep_rkey_unpack(ep, key.as_ptr().cast(), &raw mut rkey))?;
                unpacked.push((*base, rkey));
            }
            self.peer = Some((ep, unpacked));
        }
        // Connected for good, so that no later time holds it.
        self.flush()
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        let Some((ep, _)) = &self.peer else { return Ok(()) };
        // SAFETY: the endpoint is alive; zero asks for nothing special.
        let request = unsafe {
            let params: sys::ucp_request_param_t = zeroed();
            sys::ucp_ep_flush_nbx(*ep, &raw const params)
        };
        self.finish(request)
    }

    /// Waits for the end of an operation that was begun.
    fn finish(&mut self, request: sys::ucs_status_ptr_t) -> anyhow::Result<()> {
        let request = match ucx_rs::decode_status_ptr(request) {
            Ok(None) => return Ok(()),
            Ok(Some(request)) => request,
            Err(status) => bail!("{}", ucx_rs::status_string(status)),
        };
        // SAFETY: the request is one of this worker, and is freed once, here.
        unsafe {
            let status = loop {
                let status = sys::ucp_request_check_status(request);
                if status != sys::ucs_status_t_UCS_INPROGRESS {
                    break status;
                }
                sys::ucp_worker_progress(self.worker);
            };
            sys::ucp_request_free(request);
            ok("a read", status)
        }
    }

    fn read(&mut self, list: &[Descriptor]) -> anyhow::Result<()> {
        // SAFETY: zero is a value of it; the mask below says which fields are read.
        let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
        params.op_attr_mask =
            sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMH | sys::ucp_op_attr_t_UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        params.memory_type = sys::ucs_memory_type_UCS_MEMORY_TYPE_HOST;
        let mut window = VecDeque::with_capacity(WINDOW);
        for d in list {
            let &(base, memh) = self.regions.get(d.dst_region.index()).context("no such destination region")?;
            let (ep, keys) = self.peer.as_ref().context("not connected")?;
            let &(theirs, rkey) = keys.get(d.src_region.index()).context("no such source region")?;
            params.memh = memh;
            let to = std::ptr::with_exposed_provenance_mut(base + usize::try_from(d.dst_offset)?);
            // SAFETY: the batch was made for these regions, so the bytes are inside the registration of `memh`; the key is of this
            // endpoint, and both live until the last request has ended.
            let request = unsafe {
                let from = theirs + d.src_offset;
                sys::ucp_get_nbx(*ep, to, usize::try_from(d.len)?, from, rkey, &raw const params)
            };
            if !request.is_null() {
                window.push_back(request);
            }
            if window.len() == WINDOW
                && let Some(oldest) = window.pop_front()
            {
                self.finish(oldest)?;
            }
        }
        window.into_iter().try_for_each(|request| self.finish(request))
    }

    /// Works off what has come until there is nothing more, and lets the descriptor tell of the next.
    fn settle(&mut self) -> anyhow::Result<()> {
        // SAFETY: the worker is alive and used by this thread alone.
        unsafe {
            loop {
                while sys::ucp_worker_progress(self.worker) != 0 {}
                match sys::ucp_worker_arm(self.worker) {
                    sys::ucs_status_t_UCS_ERR_BUSY => {}
                    status => return ok("ucp_worker_arm", status),
                }
            }
        }
    }

    /// The descriptor that wakes it.
    fn event_fd(&self) -> anyhow::Result<OwnedFd> {
        let mut fd = -1;
        // SAFETY: the worker is alive; UCX keeps its descriptor, so a copy is made.
        unsafe {
            ok("ucp_worker_get_efd", sys::ucp_worker_get_efd(self.worker, &raw mut fd))?;
            Ok(BorrowedFd::borrow_raw(fd).try_clone_to_owned()?)
        }
    }

    /// The library's names of what the endpoint has lanes on.
    fn lane(&self) -> String {
        let Some((ep, _)) = &self.peer else { return String::new() };
        // SAFETY: `entries` has room for as many as are announced; the names are texts of UCX's that live as long as it.
        unsafe {
            let mut entries: [sys::ucp_transport_entry_t; 8] = zeroed();
            let mut attr: sys::ucp_ep_attr_t = zeroed();
            attr.field_mask = u64::from(sys::ucp_ep_attr_field_UCP_EP_ATTR_FIELD_TRANSPORTS);
            attr.transports.entries = entries.as_mut_ptr();
            attr.transports.num_entries = 8;
            attr.transports.entry_size = size_of::<sys::ucp_transport_entry_t>();
            if sys::ucp_ep_query(*ep, &raw mut attr) != sys::ucs_status_t_UCS_OK {
                return String::new();
            }
            let count = usize::try_from(attr.transports.num_entries).unwrap_or(0).min(8);
            let name = |e: &sys::ucp_transport_entry_t| {
                std::ffi::CStr::from_ptr(e.transport_name).to_string_lossy().into_owned()
            };
            let mut names: Vec<String> = entries[..count].iter().map(name).collect();
            names.dedup();
            names.join("+")
        }
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        // SAFETY: each handle is given back once, in the order that UCX asks for; nothing is outstanding.
        unsafe {
            if let Some((ep, keys)) = self.peer.take() {
                keys.into_iter().for_each(|(_, rkey)| sys::ucp_rkey_destroy(rkey));
                let params: sys::ucp_request_param_t = zeroed();
                let request = sys::ucp_ep_close_nbx(ep, &raw const params);
                drop(self.finish(request));
            }
            for (_, memh) in self.regions.drain(..) {
                sys::ucp_mem_unmap(self.context, memh);
            }
            sys::ucp_worker_destroy(self.worker);
            sys::ucp_cleanup(self.context);
        }
    }
}

/// One process of it.
pub(crate) struct End {
    rails: Vec<Rail>,
    source: bool,
    epoll: OwnedFd,
    prepared: Vec<Descriptor>,
}

impl End {
    pub(crate) fn new(memory: &Memory, side: Side, workers: usize) -> anyhow::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let regions = if is_source(side) { &memory.src } else { &memory.dst };
        let mut rails = Vec::new();
        for _ in 0..workers {
            let mut rail = Rail::open()?;
            rail.register(regions)?;
            epoll::add(&epoll, rail.event_fd()?, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            rails.push(rail);
        }
        Ok(Self { rails, source: is_source(side), epoll, prepared: Vec::new() })
    }
}

impl crate::child::End for End {
    fn hello(&mut self) -> anyhow::Result<Vec<u8>> {
        if !self.source {
            return Ok(Vec::new());
        }
        let all = self.rails.iter().map(Rail::hello).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(serde_json::to_vec(&all)?)
    }

    fn step(&mut self) -> Option<Duration> {
        // A worker that can't be armed is looked at again soon.
        let settled = self.rails.iter_mut().try_for_each(Rail::settle);
        settled.is_err().then_some(Duration::from_millis(1))
    }

    fn wake(&self) -> Option<BorrowedFd<'_>> {
        self.source.then(|| self.epoll.as_fd())
    }

    fn connect(&mut self, _: &Memory, hello: &[u8]) -> anyhow::Result<()> {
        let all: Vec<Hello> = serde_json::from_slice(hello)?;
        self.rails.iter_mut().zip(&all).try_for_each(|(rail, hello)| rail.connect(hello))
    }

    fn prepare(&mut self, memory: &Memory, work: Work) -> anyhow::Result<()> {
        self.prepared = memory.descriptors(work)?;
        Ok(())
    }

    fn read(&mut self, _: &Memory, _: Work, _: &[u8]) -> anyhow::Result<Moved> {
        let start = Instant::now();
        let share = self.prepared.len().div_ceil(self.rails.len()).max(1);
        let mut work = self.rails.iter_mut().zip(self.prepared.chunks(share));
        let own = work.next();
        std::thread::scope(|scope| {
            let others: Vec<_> = work.map(|(rail, list)| scope.spawn(move || rail.read(list))).collect();
            let mut result = own.map_or(Ok(()), |(rail, list)| rail.read(list));
            for other in others {
                result = result.and(other.join().unwrap_or_else(|_| bail!("a thread of it panicked")));
            }
            result
        })?;
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        let lane = self.rails.first().map_or_else(String::new, Rail::lane);
        Ok(Moved { ns, descriptors: self.prepared.len() as u64, lane })
    }

    fn contact(&mut self, memory: &Memory, hello: &[u8]) -> anyhow::Result<Contact> {
        let all: Vec<Hello> = serde_json::from_slice(hello)?;
        let first = all.first().context("a source without rails")?;
        let mut steps = Steps::new();
        let mut rail = Rail::open()?;
        let open_ns = steps.next();
        rail.register(&memory.dst)?;
        let register_ns = steps.next();
        rail.connect(first)?;
        let connect_ns = steps.next();
        rail.read(&memory.descriptors(Work::Small)?)?;
        Ok(Contact { open_ns, register_ns, connect_ns, first_ns: steps.next() })
    }
}
