use super::*;

fn checks(story: Story) -> Vec<Check> {
    let checked = |line| match line {
        Line::Checked(check) => Some(check),
        Line::Said(_) => None,
    };
    story.into_lines().into_iter().filter_map(checked).collect()
}

#[test]
fn a_check_fails_when_the_values_differ() {
    let mut story = Story::new(PoolMode::Vmm, Device::host(), HOST_PAGE);
    story.check("two", 2, 2);
    story.check("three", 3, 4);
    let passed: Vec<bool> = checks(story).iter().map(Check::passed).collect();
    assert_eq!(passed, [true, false]);
}

#[test]
fn long_values_that_differ_at_the_end_still_fail() {
    let mut story = Story::new(PoolMode::Vmm, Device::host(), HOST_PAGE);
    let (a, mut b) = (vec![7u32; 1000], vec![7u32; 1000]);
    story.check("same", a.clone(), b.clone());
    b[999] = 8;
    story.check("last differs", a, b);
    let passed: Vec<bool> = checks(story).iter().map(Check::passed).collect();
    assert_eq!(passed, [true, false]);
}

#[test]
fn a_refusal_must_say_what_was_asked() {
    let mut story = Story::new(PoolMode::Slab, Device::host(), HOST_PAGE);
    story.refused("wrong words", "memory", &Err::<(), _>("no stream"));
    story.refused("right words", "memory", &Err::<(), _>("out of memory"));
    story.refused("no refusal", "memory", &Ok::<(), &str>(()));
    let passed: Vec<bool> = checks(story).iter().map(Check::passed).collect();
    assert_eq!(passed, [false, true, false]);
}
