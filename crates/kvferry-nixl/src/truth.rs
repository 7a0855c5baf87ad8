//! What can be known of the lane that NIXL uses.
//!
//! NIXL's interface tells the plugin and nothing below it. The plugin UCX however has UCX loaded into this process, and UCX lists its
//! objects in a tree for tools (its virtual file system: contexts and workers by names, which are the agent's, endpoints by their
//! handles), and prints an endpoint's lanes with what each is for. So the endpoint that appears when NIXL loads a peer is that
//! peer's, and its lanes for remote memory are the truth. Where a step of this fails (another plugin, UCX built otherwise), the kind is
//! [`LaneKind::Unknown`] and the text says so.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};

use kvferry_transport::{EndpointId, Lane, LaneKind};

use crate::config::NixlConfig;
use crate::lane::agent_name;
use crate::sys::c_text;

/// The longest name that UCX keeps, without the zero.
const UCX_NAME: usize = 31;

type ListDir = unsafe extern "C" fn(*const c_char, unsafe extern "C" fn(*const c_char, *mut c_void), *mut c_void) -> i8;
type PrintInfo = unsafe extern "C" fn(*mut c_void, *mut libc::FILE);

/// UCX as the plugin has it, seen from the agent's thread.
#[derive(Debug)]
pub(crate) struct Ucx {
    list_dir: ListDir,
    print_info: PrintInfo,
    /// Where the agent's workers are listed.
    workers: String,
}

impl Ucx {
    /// Finds the UCX that the plugin uses; `None` where that can't be.
    pub(crate) fn find(agent: EndpointId) -> Option<Self> {
        let plugin = c_text(&loaded("libplugin_UCX")?);
        // SAFETY: a path that ends with a zero. Nothing is loaded: the library is there already, and stays for the life of the process, as
        // the handle is not closed.
        let plugin = unsafe { libc::dlopen(plugin.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        if plugin.is_null() {
            return None;
        }
        // SAFETY: the handle is open, and the names end with zeros. The search goes through the plugin's own libraries.
        let [list_dir, print_info] =
            [c"ucs_vfs_path_list_dir", c"ucp_ep_print_info"].map(|name| unsafe { libc::dlsym(plugin, name.as_ptr()) });
        if list_dir.is_null() || print_info.is_null() {
            return None;
        }
        // SAFETY: UCX declares the function so since it has it (1.12), and the pointer isn't null.
        let list_dir = unsafe { std::mem::transmute::<*mut c_void, ListDir>(list_dir) };
        // SAFETY: as above; a public function of UCX.
        let print_info = unsafe { std::mem::transmute::<*mut c_void, PrintInfo>(print_info) };
        let name = agent_name(agent).to_string_lossy().chars().take(UCX_NAME).collect::<String>();
        let ucx = Self { list_dir, print_info, workers: format!("/ucp/context/{name}/worker") };
        // Without a worker of the name, nothing that is found would be ours.
        if ucx.list(&ucx.workers).is_empty() { None } else { Some(ucx) }
    }

    /// The endpoints that there are, by their handles.
    pub(crate) fn endpoints(&self) -> BTreeSet<usize> {
        let of = |worker: &String| {
            let worker = format!("{}/{worker}", self.workers);
            // Looking at the worker is what brings its endpoints up to date.
            self.list(&worker);
            self.list(&format!("{worker}/ep"))
        };
        let all = self.list(&self.workers).iter().flat_map(of).collect::<Vec<_>>();
        all.iter().filter_map(|name| usize::from_str_radix(name.strip_prefix("0x")?, 16).ok()).collect()
    }

    /// The lanes of an endpoint that is among those that there are: each line that UCX prints of one.
    fn lanes(&self, endpoint: usize) -> Vec<String> {
        if !self.endpoints().contains(&endpoint) {
            return Vec::new();
        }
        let (mut text, mut len): (*mut c_char, usize) = (std::ptr::null_mut(), 0);
        // SAFETY: the places for the result live until the stream is closed.
        let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut len) };
        if stream.is_null() {
            return Vec::new();
        }
        // SAFETY: UCX has just listed this handle as that of an endpoint of the agent's, and only this thread makes the agent's calls, so it
        // still is one. The stream is open, and closed once.
        unsafe {
            (self.print_info)(std::ptr::with_exposed_provenance_mut(endpoint), stream);
            libc::fclose(stream);
        }
        if text.is_null() {
            return Vec::new();
        }
        // SAFETY: the closed stream has left a text that ends with a zero, from `malloc`, which is freed once.
        let all = unsafe {
            let all = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            all
        };
        all.lines().filter(|line| line.contains("lane[")).map(str::to_owned).collect()
    }

    fn list(&self, path: &str) -> Vec<String> {
        unsafe extern "C" fn each(name: *const c_char, out: *mut c_void) {
            // SAFETY: UCX hands on the pointer to the vector below, which is alive and not used otherwise during the call, and a text.
            let (out, name) = unsafe { (&mut *out.cast::<Vec<String>>(), CStr::from_ptr(name)) };
            out.push(name.to_string_lossy().into_owned());
        }
        let mut out: Vec<String> = Vec::new();
        let path = c_text(path);
        // SAFETY: a path that ends with a zero, and a callback that fits its argument.
        unsafe { (self.list_dir)(path.as_ptr(), each, (&raw mut out).cast()) };
        out
    }
}

/// The path of a library of this process whose file's name begins so.
fn loaded(prefix: &str) -> Option<String> {
    struct Search<'a> {
        prefix: &'a str,
        found: Option<String>,
    }
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
        // SAFETY: the linker hands on the pointer to the search below, which is alive and not used otherwise during the call, and an entry.
        let (search, info) = unsafe { (&mut *search.cast::<Search<'_>>(), &*info) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: a text of the linker's.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_string_lossy();
        if path.rsplit('/').next().is_some_and(|file| file.starts_with(search.prefix)) {
            search.found = Some(path.into_owned());
            return 1;
        }
        0
    }
    let mut search = Search { prefix, found: None };
    // SAFETY: a callback that fits its argument.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut search).cast()) };
    search.found
}

/// The lane to a peer that is up: `endpoint` is UCX's handle for it, where it was found.
pub(crate) fn lane(config: &NixlConfig, ucx: Option<&Ucx>, endpoint: Option<usize>) -> Lane {
    let lines = ucx.zip(endpoint).map_or(Vec::new(), |(ucx, endpoint)| ucx.lanes(endpoint));
    let lanes: Vec<UcxLane> = lines.iter().filter_map(|line| UcxLane::parse(line)).collect();
    read(&config.plugin, &lanes)
}

/// The lane to a peer that has not answered.
pub(crate) fn intended(config: &NixlConfig) -> Lane {
    unknown(format!("NIXL, plugin {}; not up yet", config.plugin))
}

fn unknown(detail: String) -> Lane {
    Lane { kind: LaneKind::Unknown, transports: Vec::new(), detail, measured: None }
}

/// One lane of a UCX endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
struct UcxLane {
    transport: String,
    device: String,
    /// It carries reads and writes of remote memory.
    remote_memory: bool,
    /// It carries messages.
    messages: bool,
}

impl UcxLane {
    /// Parses what UCX prints: `lane[0]:  2:cma/memory.0 md[3]  -> md[3]/cma/sysdev[255]  rma_bw#0`.
    fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once("lane[")?;
        let (_, rest) = rest.split_once("]:")?;
        let mut words = rest.split_whitespace();
        let (_, name) = words.next()?.split_once(':')?;
        let (transport, device) = name.split_once('/')?;
        let uses: Vec<&str> = words.collect();
        let remote_memory = uses.iter().any(|word| word.starts_with("rma_bw#") || word.starts_with("rma#"));
        let messages = uses.iter().any(|word| *word == "am" || word.starts_with("am_bw#"));
        let device = device.rsplit_once('.').map_or(device, |(device, _)| device);
        Some(Self { transport: transport.to_owned(), device: device.to_owned(), remote_memory, messages })
    }
}

/// The lane that UCX's lanes make: of a kind only where all that carry bytes are.
fn read(plugin: &str, lanes: &[UcxLane]) -> Lane {
    // Without one for remote memory, UCX does it by messages.
    let by_messages = !lanes.iter().any(|l| l.remote_memory);
    let carriers: Vec<&UcxLane> =
        lanes.iter().filter(|l| if by_messages { l.messages } else { l.remote_memory }).collect();
    let mut transports: Vec<String> = Vec::new();
    for lane in carriers {
        if !transports.contains(&lane.transport) {
            transports.push(lane.transport.clone());
        }
    }
    let Some(first) = transports.first() else {
        let why = "its interface doesn't tell which transport carries the bytes";
        return unknown(format!("NIXL, plugin {plugin}; {why}; preflight measures what it does"));
    };
    let kind = kind(first, by_messages);
    let mixed = transports.iter().any(|t| self::kind(t, by_messages) != kind);
    let kind = if mixed { LaneKind::Unknown } else { kind };
    let all: Vec<String> = lanes.iter().map(|l| format!("{}/{}", l.transport, l.device)).collect();
    let how = match by_messages || kind == LaneKind::Stream {
        true => "the peer's thread takes part",
        false => "one-sided",
    };
    let mixed = if mixed { "; mixed" } else { "" };
    let detail = format!("NIXL, plugin {plugin}; UCX's lanes to the peer: {}; {how}{mixed}", all.join(" "));
    Lane { kind, transports, detail, measured: None }
}

/// The kind of one of UCX's transports. What carries messages alone reaches no memory by itself, whatever it could do otherwise.
fn kind(transport: &str, by_messages: bool) -> LaneKind {
    match LaneKind::of_transport(transport) {
        Some(LaneKind::Rdma | LaneKind::CrossProcess | LaneKind::DeviceDirect) if by_messages => LaneKind::Unknown,
        kind => kind.unwrap_or(LaneKind::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Lane {
        read("UCX", &lines.iter().filter_map(|l| UcxLane::parse(l)).collect::<Vec<_>>())
    }

    #[test]
    fn the_lane_for_remote_memory_counts() {
        let lane = of(&[
            "#                 lane[0]:  0:posix/memory.0 md[0]          -> md[0]/posix/sysdev[255]  am am_bw#0",
            "#                 lane[1]:  4:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255]  rma_bw#0",
            "#                 lane[2]:  2:tcp/eth0.0 md[1]              -> md[1]/tcp/sysdev[0]  keepalive",
        ]);
        assert_eq!((lane.kind, lane.transports), (LaneKind::CrossProcess, vec!["cma".to_owned()]));
        assert!(lane.detail.contains("posix/memory cma/memory tcp/eth0; one-sided"), "{}", lane.detail);
        let rails = of(&[
            "# lane[0]:  3:rc_mlx5/mlx5_0:1.0 md[2]   -> md[2]/ib/sysdev[1]  rma_bw#0 am",
            "# lane[1]:  5:rc_mlx5/mlx5_1:1.0 md[3]   -> md[3]/ib/sysdev[2]  rma_bw#1",
        ]);
        assert_eq!((rails.kind, rails.transports), (LaneKind::Rdma, vec!["rc_mlx5".to_owned()]));
        let both = of(&[
            "# lane[0]:  3:rc_mlx5/mlx5_0:1.0 md[2]   -> md[2]/ib/sysdev[1]  rma_bw#0 am",
            "# lane[1]:  2:tcp/eth0.0 md[1]           -> md[1]/tcp/sysdev[0]  rma_bw#1",
        ]);
        assert_eq!((both.kind, both.transports.len()), (LaneKind::Unknown, 2));
        assert!(both.detail.ends_with("mixed"), "{}", both.detail);
    }

    #[test]
    fn messages_stand_in_and_nothing_is_guessed() {
        let tcp = of(&["# lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255]  am am_bw#0"]);
        assert_eq!((tcp.kind, tcp.transports), (LaneKind::Stream, vec!["tcp".to_owned()]));
        assert!(tcp.detail.contains("takes part"));
        let rc = of(&["# lane[0]:  3:rc_verbs/mlx5_0:1.0 md[2] -> md[2]/ib/sysdev[1]  am am_bw#0"]);
        assert_eq!((rc.kind, rc.transports), (LaneKind::Unknown, vec!["rc_verbs".to_owned()]));
        assert_eq!(of(&[]).kind, LaneKind::Unknown);
        assert_eq!(of(&["# lane[0]:  2:new_thing/x.0 md[1] -> am"]).kind, LaneKind::Unknown);
        assert_eq!(UcxLane::parse("# rma_bw: mds [1]"), None);
    }
}
