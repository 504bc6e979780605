//! The account for people.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

use super::{Account, Share};
use crate::cli::format_size;

/// What each side holds, a row each.
#[must_use]
pub fn table(account: &Account) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header([
        "",
        "weights",
        "of experts",
        "cache, at most",
        "now",
        "prompt scratch",
        "decode scratch",
        "total",
    ]);
    table.add_row(row("device", &account.device));
    table.add_row(row("host", &account.host));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.trim_fmt();
    let kept = account.device.kept_experts_bytes;
    if kept > 0 {
        text.push_str(&format!(
            "\n(and on the device {} of the host's experts, those that are chosen most)",
            format_size(kept)
        ));
    }
    if account.in_place {
        text.push_str("\n(the device reads weights where the file is: they take nothing of the pool)");
    }
    text
}

fn row(name: &str, share: &Share) -> [String; 8] {
    let maybe = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), format_size);
    [
        name.to_owned(),
        format_size(share.weights_bytes),
        format_size(share.experts_bytes),
        format_size(share.cache_most_bytes),
        format_size(share.cache_bytes),
        maybe(share.prompt_scratch_bytes),
        maybe(share.decode_scratch_bytes),
        format_size(share.total_bytes()),
    ]
}

#[cfg(test)]
mod tests;
