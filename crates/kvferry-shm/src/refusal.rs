//! Why the kernel refuses copies between two processes, in words that name cause and cure.

use rustix::io::Errno;

/// What is known of the two processes and their system. Each part is `None` where it could not be found out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Surroundings {
    /// Value of `kernel.yama.ptrace_scope`.
    pub(crate) ptrace_scope: Option<u32>,
    /// `Seccomp:` of our `/proc/self/status`.
    pub(crate) seccomp: Option<u32>,
    /// Effective user ids, ours and the peer's.
    pub(crate) users: Option<(u32, u32)>,
    /// Whether both are in one user namespace.
    pub(crate) same_user_namespace: Option<bool>,
    /// Whether `/proc/PID` of the peer can be seen.
    pub(crate) peer_visible: Option<bool>,
}

impl Surroundings {
    /// Looks around.
    pub(crate) fn look(pid: i32, peer_user: u32) -> Self {
        let number = |text: Option<String>| text.and_then(|t| t.trim().parse().ok());
        let status = std::fs::read_to_string("/proc/self/status").ok();
        let seccomp = status.and_then(|s| s.lines().find_map(|l| l.strip_prefix("Seccomp:").map(str::to_owned)));
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/user")).ok();
        let theirs = namespace(&pid.to_string());
        Self {
            ptrace_scope: number(std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()),
            seccomp: number(seccomp),
            users: Some((rustix::process::geteuid().as_raw(), peer_user)),
            same_user_namespace: namespace("self").zip(theirs).map(|(a, b)| a == b),
            peer_visible: Some(std::path::Path::new(&format!("/proc/{pid}")).exists()),
        }
    }
}

/// The words.
pub(crate) fn explain(errno: Errno, at: &Surroundings) -> String {
    let mut causes = Vec::new();
    match errno {
        Errno::PERM | Errno::ACCESS => causes_of_perm(at, &mut causes),
        Errno::NOSYS => {
            if at.seccomp == Some(2) {
                causes.push(SECCOMP.to_owned());
            }
            causes.push("the kernel may lack CONFIG_CROSS_MEMORY_ATTACH".to_owned());
        }
        Errno::SRCH => {
            causes.push(match at.peer_visible {
                Some(false) => {
                    "its process is not visible from here: it has ended, is in another pid namespace, or /proc is \
                                mounted with hidepid; run both in one pid namespace"
                        .to_owned()
                }
                _ => "its process has ended".to_owned(),
            });
        }
        Errno::FAULT => causes.push("its memory is not mapped at the address that it gave".to_owned()),
        _ => {}
    }
    let causes = if causes.is_empty() { String::new() } else { format!(": {}", causes.join("; ")) };
    format!(
        "process_vm_readv/writev of the peer's memory failed with {errno}{causes}. Memory backed by a memfd needs no such call"
    )
}

const SECCOMP: &str = "a seccomp filter is active (Seccomp: 2 in /proc/self/status); let the container's profile allow \
                       process_vm_readv and process_vm_writev, for example with --cap-add SYS_PTRACE";

fn causes_of_perm(at: &Surroundings, causes: &mut Vec<String>) {
    if let Some((ours, theirs)) = at.users
        && ours != theirs
    {
        causes.push(format!("we run as user {ours}, the peer as {theirs}; run both as one user"));
    }
    if at.same_user_namespace == Some(false) {
        causes.push("the two are in different user namespaces; run both in one".to_owned());
    }
    match at.ptrace_scope {
        Some(scope @ 1) => causes.push(format!(
            "kernel.yama.ptrace_scope is {scope}; set it to 0, give this process CAP_SYS_PTRACE, or let the peer call \
             prctl(PR_SET_PTRACER)"
        )),
        Some(scope @ 2) => {
            causes
                .push(format!("kernel.yama.ptrace_scope is {scope}; set it to 0 or give this process CAP_SYS_PTRACE"));
        }
        Some(scope) if scope >= 3 => {
            causes.push(format!("kernel.yama.ptrace_scope is {scope}, which only a reboot changes"));
        }
        _ => {}
    }
    if at.seccomp == Some(2) {
        causes.push(SECCOMP.to_owned());
    }
    if causes.is_empty() {
        causes.push("the peer may not be dumpable (PR_SET_DUMPABLE), or a security module forbids it".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_names_its_cause_and_cure() {
        let at = Surroundings::default();
        let cases = [
            (Errno::PERM, Surroundings { ptrace_scope: Some(1), ..at.clone() }, "ptrace_scope is 1; set it to 0"),
            (Errno::PERM, Surroundings { ptrace_scope: Some(2), ..at.clone() }, "CAP_SYS_PTRACE"),
            (Errno::PERM, Surroundings { ptrace_scope: Some(3), ..at.clone() }, "only a reboot"),
            (Errno::PERM, Surroundings { seccomp: Some(2), ..at.clone() }, "seccomp filter"),
            (
                Errno::PERM,
                Surroundings { users: Some((1000, 0)), ..at.clone() },
                "user 1000, the peer as 0; run both as one",
            ),
            (Errno::PERM, Surroundings { same_user_namespace: Some(false), ..at.clone() }, "user namespaces"),
            (Errno::PERM, Surroundings { users: Some((1, 1)), ..at.clone() }, "PR_SET_DUMPABLE"),
            (Errno::NOSYS, Surroundings { seccomp: Some(2), ..at.clone() }, "seccomp filter"),
            (Errno::NOSYS, at.clone(), "CONFIG_CROSS_MEMORY_ATTACH"),
            (Errno::SRCH, Surroundings { peer_visible: Some(false), ..at.clone() }, "hidepid"),
            (Errno::SRCH, Surroundings { peer_visible: Some(true), ..at.clone() }, "has ended"),
            (Errno::FAULT, at.clone(), "not mapped"),
        ];
        for (errno, at, expected) in cases {
            let text = explain(errno, &at);
            assert!(text.contains(expected) && text.contains("memfd"), "{text}");
        }
        // Several causes are all named.
        let both = explain(Errno::PERM, &Surroundings { ptrace_scope: Some(1), seccomp: Some(2), ..at });
        assert!(both.contains("ptrace_scope") && both.contains("seccomp"), "{both}");
    }

    #[test]
    fn looking_around_finds_ourselves() {
        let own = i32::try_from(std::process::id()).unwrap();
        let at = Surroundings::look(own, rustix::process::geteuid().as_raw());
        assert_eq!((at.same_user_namespace, at.peer_visible), (Some(true), Some(true)));
        assert!(at.seccomp.is_some() && at.users.is_some_and(|(a, b)| a == b));
        assert_eq!(Surroundings::look(i32::MAX, 0).peer_visible, Some(false));
    }
}
