//! How much memory there is to have.

use std::fs::read_to_string;

use kvferry_geometry::units::Bytes;

/// Memory that can be taken without swapping, in bytes: the kernel's estimate (`MemAvailable`), or what the control
/// group still allows where that is less. `None` where the system doesn't say.
#[must_use]
pub fn available_memory() -> Option<Bytes> {
    let machine = mem_available(&read_to_string("/proc/meminfo").ok()?)?;
    let group = group_left(
        read_to_string("/sys/fs/cgroup/memory.max").ok().as_deref(),
        read_to_string("/sys/fs/cgroup/memory.current").ok().as_deref(),
        read_to_string("/sys/fs/cgroup/memory.stat").ok().as_deref(),
    );
    Some(Bytes::new(group.map_or(machine, |group| group.min(machine))))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What a control group of version 2 has left; clean file pages are counted as free.
fn group_left(max: Option<&str>, current: Option<&str>, stat: Option<&str>) -> Option<u64> {
    let max: u64 = max?.trim().parse().ok()?;
    let current: u64 = current?.trim().parse().ok()?;
    let inactive = stat.and_then(|s| s.lines().find_map(|l| l.strip_prefix("inactive_file "))?.trim().parse().ok());
    Some(max.saturating_sub(current.saturating_sub(inactive.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "MemTotal:       24592888 kB\nMemFree:        1 kB\nMemAvailable:   23956284 kB\n";
        assert_eq!(mem_available(text), Some(23_956_284 * 1024));
        assert_eq!(mem_available("MemFree: 1 kB\n"), None);
        assert_eq!(mem_available("MemAvailable: 18446744073709551615 kB"), None);
        assert!(available_memory().is_some_and(|b| b.get() > 1 << 20));
    }

    #[test]
    fn a_group_without_limit_does_not_count() {
        assert_eq!(group_left(Some("max\n"), Some("5\n"), None), None);
        assert_eq!(group_left(Some("100\n"), Some("30\n"), None), Some(70));
        assert_eq!(group_left(Some("100\n"), Some("30\n"), Some("file 9\ninactive_file 10\n")), Some(80));
        assert_eq!(group_left(Some("100\n"), Some("130\n"), None), Some(0));
    }
}
