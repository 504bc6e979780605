use super::*;

#[test]
fn the_table_has_a_row_a_side_and_says_what_is_not_known() {
    let device = Share {
        weights_bytes: 3 << 30,
        experts_bytes: 2 << 30,
        cache_most_bytes: 1 << 30,
        prompt_scratch_bytes: Some(512 << 20),
        decode_scratch_bytes: Some(1 << 20),
        ..Share::default()
    };
    let host = Share { weights_bytes: 7 << 30, ..Share::default() };
    let account = Account { device, host, in_place: false };
    let text = table(&account);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(lines[1].join(" "), "device 3.0 GiB 2.0 GiB 1.0 GiB 0 B 512.0 MiB 1.0 MiB 4.5 GiB");
    assert_eq!(lines[2].join(" "), "host 7.0 GiB 0 B 0 B 0 B - - 7.0 GiB");
    assert!(!text.contains("where the file is"));
    let kept = Share { kept_experts_bytes: 1 << 30, ..device };
    let text = table(&Account { device: kept, ..account });
    assert!(text.contains("5.5 GiB") && text.contains("on the device 1.0 GiB of the host's experts"), "{text}");
    assert!(table(&Account { in_place: true, ..account }).contains("where the file is"));
}
