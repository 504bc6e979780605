//! Samples, what is said of them, and the table of several programs' rows.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// One measured thing: a line of JSON, a cell of the table. The rivals' program writes the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub bench: String,
    /// At which size.
    pub case: String,
    /// Of whom.
    pub who: String,
    /// Its unit.
    pub unit: String,
    /// How many samples; a sample may be a mean over a batch.
    pub n: usize,
    /// The median.
    pub median: f64,
    /// The 10th percentile.
    pub p10: f64,
    /// The 90th percentile.
    pub p90: f64,
}

impl Row {
    /// A row of samples; `None` without any.
    #[must_use]
    pub fn of(bench: &str, case: &str, who: &str, unit: &str, samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            bench: bench.to_owned(),
            case: case.to_owned(),
            who: who.to_owned(),
            unit: unit.to_owned(),
            n: sorted.len(),
            median: percentile(&sorted, 0.5)?,
            p10: percentile(&sorted, 0.1)?,
            p90: percentile(&sorted, 0.9)?,
        })
    }
}

/// Of sorted samples: the one nearest to that share of them.
#[must_use]
pub fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get((share * last as f64).round() as usize).copied()
}

/// The median of unsorted samples; 0 without any.
#[must_use]
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, 0.5).unwrap_or(0.0)
}

/// Mean time of one of `times` rounds, ns.
///
/// # Errors
/// Those of `body`.
#[inline]
pub fn batch<E>(times: u32, mut body: impl FnMut(u32) -> Result<(), E>) -> Result<f64, E> {
    let start = Instant::now();
    for turn in 0..times {
        body(turn)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(times.max(1)))
}

/// Reads lines of JSON; other lines (a program's own words) are left out.
#[must_use]
pub fn read(text: &str) -> Vec<Row> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// A table: a line for each bench, case and program, in the order in which benches and cases first came.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut order: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for row in rows {
        let next = order.len();
        order.entry((&row.bench, &row.case)).or_insert(next);
    }
    let first = |bench: &str| order.iter().filter(|((b, _), _)| *b == bench).map(|(_, &at)| at).min();
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| (first(&row.bench), order.get(&(row.bench.as_str(), row.case.as_str()))));
    let mut out =
        String::from("| what | case | who | median | p10 | p90 | unit | n |\n|---|---|---|---|---|---|---|---|\n");
    for row in sorted {
        let Row { bench, case, who, unit, n, median, p10, p90 } = row;
        let digits = match median.abs() {
            _ if unit == "ratio" => 3,
            small if small < 1.0 => 3,
            small if small < 100.0 => 1,
            _ => 0,
        };
        let _ = writeln!(
            out,
            "| {bench} | {case} | {who} | {median:.digits$} | {p10:.digits$} | {p90:.digits$} | {unit} | {n} |"
        );
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_median_and_spread_of_its_samples() {
        let samples: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        let row = Row::of("b", "c", "w", "ns", &samples).unwrap();
        assert_eq!((row.n, row.median, row.p10, row.p90), (101, 50.0, 10.0, 90.0));
        assert_eq!(Row::of("b", "c", "w", "ns", &[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }

    /// As the rivals' program prints it, among words that are none.
    #[test]
    fn lines_of_other_programs_are_read_and_put_beside_ours() {
        let text = "warming up\n\
            {\"bench\":\"pair\",\"case\":\"512 B\",\"who\":\"other\",\"unit\":\"ns\",\"n\":300,\"median\":730.000,\"p10\":700.000,\"p90\":800.000}\n";
        let mut rows = vec![
            Row::of("pair", "512 B", "ours", "ns", &[60.0]).unwrap(),
            Row::of("churn", "100", "ours", "ns", &[150.0]).unwrap(),
        ];
        rows.extend(read(text));
        let table = table(&rows);
        let lines: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(lines[0], "| pair | 512 B | ours | 60.0 | 60.0 | 60.0 | ns | 1 |");
        assert_eq!(lines[1], "| pair | 512 B | other | 730 | 700 | 800 | ns | 300 |");
        assert!(lines[2].starts_with("| churn"));
    }

    #[test]
    fn a_batch_is_a_mean_and_stops_at_an_error() {
        let mut turns = 0;
        let mean = batch::<()>(10, |_| {
            turns += 1;
            Ok(())
        });
        assert!(mean.is_ok_and(|ns| ns >= 0.0) && turns == 10);
        assert_eq!(batch(10, |turn| if turn == 3 { Err(turn) } else { Ok(()) }), Err(3));
    }
}
