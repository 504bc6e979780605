use super::*;

const MIB: usize = 1 << 20;

fn pages(chunks: usize, mib: usize) -> Pages {
    Pages { chunks, chunk_bytes: mib * MIB }
}

/// A table that no measurement moves.
fn fixed() -> CostTable {
    CostTable { refine: false, ..CostTable::h200() }
}

fn case(nodes: usize, pages: Pages) -> Case {
    Case { nodes, pages: Some(pages), at_hand: true, life: 64.0, may_wait: true }
}

#[test]
fn the_table_is_met_at_its_points_and_between_them() {
    let table = fixed();
    let costs = Costs::new(table.clone());
    for (index, nodes) in [100, 300, 1000].into_iter().enumerate() {
        assert!((costs.predict(Step::Instantiate, nodes) - table.instantiate_us[index]).abs() < 0.01, "{nodes}");
    }
    let middle = (table.instantiate_us[0] + table.instantiate_us[1]) / 2.0;
    assert!((costs.predict(Step::Instantiate, 200) - middle).abs() < 0.01);
    assert!(costs.predict(Step::Capture, 2000) > table.capture_us[2]);
    assert!(costs.predict(Step::Capture, 0) > 0.0);
    for (row, chunks) in [1, 8, 64].into_iter().enumerate() {
        for (column, mib) in [2, 32].into_iter().enumerate() {
            let us = costs.remap_us(pages(chunks, mib));
            assert!((us - table.remap_us[row][column]).abs() < 0.01, "{chunks} of {mib} MiB: {us}");
        }
    }
    assert_eq!(costs.remap_us(pages(0, 2)), 0.0);
    assert_eq!(costs.remap_us(Pages { chunks: 8, chunk_bytes: 64 << 10 }), costs.remap_us(pages(8, 2)));
    let between = costs.remap_us(pages(4, 17));
    assert!(between > costs.remap_us(pages(4, 2)) && between < costs.remap_us(pages(4, 32)));
    assert!(costs.remap_us(pages(128, 2)) > 1.5 * table.remap_us[2][0], "beyond the last point it goes on");
}

#[test]
fn measurements_refine_the_table() {
    let costs = Costs::new(CostTable { eager_us: [412.0, 1294.0, 4080.0], ..CostTable::h200() });
    costs.measured(Step::Eager, 100, Duration::from_micros(824));
    assert!((costs.predict(Step::Eager, 300) - 2588.0).abs() < 1.0);
    costs.measured(Step::Eager, 100, Duration::from_secs(3600));
    assert!(costs.predict(Step::Eager, 100) < 412.0 * 23.0, "one absurd sample has bounded weight");
    let listed = costs.remap_us(pages(8, 2));
    costs.remapped(pages(1, 2), Duration::from_secs_f32(costs.remap_us(pages(1, 2)) * 3e-6));
    assert!((costs.remap_us(pages(8, 2)) / listed - 3.0).abs() < 0.01);
    assert_eq!((costs.times().capture, costs.times().remap.is_some()), (None, true));
}

/// With memory at hand the cheaper side of the table is taken at each of its corners, whatever the table says.
#[test]
fn the_choice_follows_the_table_at_its_corners() {
    for table in [fixed(), CostTable { refine: false, ..CostTable::host() }] {
        let costs = Costs::new(table.clone());
        for (n, nodes) in [100, 300, 1000].into_iter().enumerate() {
            for (row, chunks) in [1, 8, 64].into_iter().enumerate() {
                for (column, mib) in [2, 32].into_iter().enumerate() {
                    let anew = table.capture_us[n] + table.scan_us[n] + table.update_us[n];
                    let (repair, us) = match table.remap_us[row][column] {
                        remap if remap <= anew => (Repair::Remap, remap),
                        _ => (Repair::Capture, anew),
                    };
                    let eager = table.eager_us[n] < us / 64.0 + table.launch_us[n];
                    let expected = if eager { Repair::Eager } else { repair };
                    let got = costs.cheapest(&case(nodes, pages(chunks, mib)));
                    assert_eq!(got, expected, "{nodes} nodes, {chunks} chunks of {mib} MiB");
                }
            }
        }
    }
}

/// A table of round numbers, and by hand what must come of it.
#[test]
fn few_pages_many_nodes_are_remapped_and_many_pages_few_nodes_are_captured_anew() {
    let table = CostTable {
        capture_us: [50.0, 150.0, 500.0],
        scan_us: [10.0, 30.0, 100.0],
        instantiate_us: [100.0, 300.0, 1000.0],
        update_us: [5.0, 10.0, 50.0],
        eager_us: [400.0, 1200.0, 4000.0],
        launch_us: [80.0, 250.0, 800.0],
        remap_us: [[40.0, 60.0], [300.0, 500.0], [2500.0, 4000.0]],
        refine: false,
    };
    let costs = Costs::new(table);
    let choose = |nodes, chunks, mib| costs.cheapest(&case(nodes, pages(chunks, mib)));
    use Repair::{Capture, Remap};
    // A new capture costs 65, 190 and 650 µs; pages 40 µs for one chunk, about 150 for four, 300 for eight.
    assert_eq!([choose(100, 1, 2), choose(100, 8, 2), choose(100, 64, 2)], [Remap, Capture, Capture]);
    assert_eq!([choose(300, 1, 2), choose(300, 4, 2), choose(300, 8, 2)], [Remap, Remap, Capture]);
    assert_eq!([choose(1000, 8, 2), choose(1000, 8, 32), choose(1000, 64, 32)], [Remap, Remap, Capture]);
}

/// Without memory at hand a new capture pays for the same pages, and for the capture that finds out.
#[test]
fn without_memory_at_hand_pages_go_back_whatever_they_cost() {
    let costs = Costs::new(fixed());
    let dear = Case { at_hand: false, ..case(100, pages(64, 32)) };
    assert_eq!(costs.cheapest(&dear), Repair::Remap);
    assert_eq!(costs.cheapest(&Case { at_hand: true, ..dear }), Repair::Capture);
    // What pages do not repair is captured anew all the same.
    assert_eq!(costs.cheapest(&Case { pages: None, ..dear }), Repair::Capture);
}

/// Equal prices: no code of the caller's runs.
#[test]
fn between_equals_pages_go_back() {
    let costs = Costs::new(fixed().flat_remap(0.0));
    let anew = costs.update_us(300);
    let pages = pages(8, 2);
    assert_eq!(Costs::new(fixed().flat_remap(anew)).cheapest(&case(300, pages)), Repair::Remap);
    assert_eq!(Costs::new(fixed().flat_remap(anew + 1.0)).cheapest(&case(300, pages)), Repair::Capture);
}

/// A graph that goes stale at every run is not worth a repair that costs more than running without it; but it may be put off
/// only where that is allowed.
#[test]
fn what_always_goes_stale_is_run_without_a_graph() {
    let dear = CostTable { capture_us: [2000.0, 6000.0, 20_000.0], ..fixed() };
    let costs = Costs::new(dear);
    let stale = Case { pages: None, life: 1.0, ..case(300, Pages::default()) };
    assert_eq!(costs.cheapest(&stale), Repair::Eager);
    assert_eq!(costs.cheapest(&Case { may_wait: false, ..stale }), Repair::Capture);
    assert_eq!(costs.cheapest(&Case { life: 64.0, ..stale }), Repair::Capture);
}

/// The price of pages is paid once before the table is believed.
#[test]
fn a_price_that_was_never_paid_is_paid_once() {
    let costs = Costs::new(CostTable { refine: true, ..fixed() }.flat_remap(20_000.0));
    let case = case(300, pages(1, 2));
    assert_eq!(costs.cheapest(&case), Repair::Remap);
    costs.remapped(pages(1, 2), Duration::from_millis(30));
    assert_eq!(costs.cheapest(&case), Repair::Capture);
}
