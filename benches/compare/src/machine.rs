//! Where it ran.

use std::fs::read_to_string;

fn field(text: &str, name: &str) -> String {
    let value = |l: &str| l.strip_prefix(name)?.trim_start().strip_prefix(':').map(|v| v.trim().to_owned());
    text.lines().find_map(value).unwrap_or_else(|| "unknown".to_owned())
}

/// Processor, memory, system, and how busy it was, as lines of a list.
pub(crate) fn describe() -> Vec<String> {
    let read = |path: &str| read_to_string(path).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory: u64 =
        field(&read("/proc/meminfo"), "MemTotal").split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
    let system = rustix::system::uname();
    vec![
        format!(
            "{cores} processors ({}), {:.0} GiB of memory",
            field(&read("/proc/cpuinfo"), "model name"),
            memory as f64 / f64::from(1 << 20)
        ),
        format!(
            "{} {}; huge pages for anonymous memory: {}, for shared memory: {}",
            system.sysname().to_string_lossy(),
            system.release().to_string_lossy(),
            read("/sys/kernel/mm/transparent_hugepage/enabled").trim(),
            read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").trim()
        ),
        format!("load before the start: {}", load()),
    ]
}

/// The load averages.
pub(crate) fn load() -> String {
    let text = read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
