use super::*;

#[test]
fn what_is_kept_out_is_not_asked_for() {
    assert_eq!(look(false), Err(Missing::Limit));
    assert_eq!(missing(), look(Limit::current() >= Limit::Amx).err(), "asking again changes nothing");
}

/// The kernel's list of what it found says the same as we do.
#[test]
#[cfg(target_os = "linux")]
fn the_kernels_list_of_features_agrees() {
    let list = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let Some(flags) = list.lines().find(|line| line.starts_with("flags")) else { return };
    let listed = ["amx_tile", "amx_int8"].iter().all(|name| flags.split_whitespace().any(|flag| flag == *name));
    match look(true) {
        Ok(()) | Err(Missing::Refused(_) | Missing::Vnni | Missing::Shape) => assert!(listed, "found, but not listed"),
        Err(missing) => assert!(!listed, "listed, but {missing}"),
    }
}
