//! Stories of events.

use super::rig::kind;
use super::stories;
use crate::driver::DriverErrorKind;

stories! { in events as conformance_events;

    /// A stream-side wait orders two streams.
    fn a_wait_orders_two_streams(rig) {
        let (producer, consumer) = (rig.stream(), rig.stream());
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let event = rig.event();
        for round in 1..5 {
            rig.hold(producer);
            rig.fill(a, 4, round, producer);
            rig.driver.event_record(event, producer).unwrap();
            rig.driver.stream_wait_event(consumer, event).unwrap();
            rig.add(b, a, 4, 100, consumer);
            assert!(!rig.driver.stream_query(consumer).unwrap());
            rig.open();
            rig.wait(consumer);
            assert_eq!(rig.read(b, 4), [100 + round; 4]);
        }
    }

    /// A wait is for the record that it found, not for a later one.
    fn a_wait_takes_the_record_of_its_time(rig) {
        let (producer, consumer) = (rig.stream(), rig.stream());
        let event = rig.event();
        let ptr = rig.words(4, 0);
        rig.fill(ptr, 4, 1, producer);
        rig.driver.event_record(event, producer).unwrap();
        rig.driver.stream_wait_event(consumer, event).unwrap();
        rig.hold(producer);
        rig.fill(ptr, 4, 2, producer);
        rig.driver.event_record(event, producer).unwrap();
        rig.wait(consumer);
        assert_eq!(rig.read(ptr, 4), [1; 4]);
        assert!(!rig.driver.event_query(event).unwrap());
        rig.open();
        rig.driver.event_synchronize(event).unwrap();
        assert_eq!(rig.read(ptr, 4), [2; 4]);
    }

    /// An event that was never recorded is complete, and a wait for it is none.
    fn an_unrecorded_event_is_complete(rig) {
        let event = rig.event();
        assert!(rig.driver.event_query(event).unwrap());
        rig.driver.event_synchronize(event).unwrap();
        let stream = rig.stream();
        rig.driver.stream_wait_event(stream, event).unwrap();
        rig.wait(stream);
    }

    /// An event completes with the work before it, not with the work behind it.
    fn an_event_covers_the_work_before_it_only(rig) {
        let stream = rig.stream();
        let event = rig.event();
        let ptr = rig.words(4, 0);
        rig.fill(ptr, 4, 1, stream);
        rig.driver.event_record(event, stream).unwrap();
        rig.hold(stream);
        rig.fill(ptr, 4, 2, stream);
        rig.driver.event_synchronize(event).unwrap();
        assert_eq!(rig.read(ptr, 4), [1; 4]);
        assert!(rig.driver.event_query(event).unwrap());
        assert!(!rig.driver.stream_query(stream).unwrap());
        rig.open();
        rig.wait(stream);
    }

    /// A destroyed event keeps its promise to who waits already; its handle is the next event's.
    fn a_destroyed_event_keeps_its_promise(rig) {
        let (producer, consumer) = (rig.stream(), rig.stream());
        let (a, b) = (rig.words(4, 0), rig.words(4, 0));
        let event = rig.event();
        rig.hold(producer);
        rig.fill(a, 4, 7, producer);
        rig.driver.event_record(event, producer).unwrap();
        rig.driver.stream_wait_event(consumer, event).unwrap();
        rig.driver.event_destroy(event).unwrap();
        let next = rig.event();
        if rig.tracks_handles() {
            assert_eq!(next, event);
            rig.driver.event_destroy(next).unwrap();
            assert!(matches!(kind(rig.driver.event_query(event)), DriverErrorKind::InvalidHandle(_)));
        }
        let next = rig.event();
        assert!(rig.driver.event_query(next).unwrap());
        rig.add(b, a, 4, 1, consumer);
        rig.open();
        rig.wait(consumer);
        assert_eq!(rig.read(b, 4), [8; 4]);
    }

    /// Times come from timing events that have completed.
    fn times_need_completed_timing_events(rig) {
        let stream = rig.stream();
        let start = rig.driver.event_create(true).unwrap();
        let end = rig.driver.event_create(true).unwrap();
        let plain = rig.event();
        let ptr = rig.words(4, 0);
        assert!(rig.driver.event_elapsed_ms(start, end).is_err());
        rig.driver.event_record(start, stream).unwrap();
        rig.hold(stream);
        rig.fill(ptr, 4, 1, stream);
        rig.driver.event_record(end, stream).unwrap();
        rig.driver.event_record(plain, stream).unwrap();
        assert!(matches!(kind(rig.driver.event_elapsed_ms(start, end)), DriverErrorKind::Other { code: 600, .. }));
        rig.open();
        rig.wait(stream);
        assert!(rig.driver.event_elapsed_ms(start, end).unwrap() > 0.0);
        assert!(rig.driver.event_elapsed_ms(end, start).unwrap() < 0.0);
        assert!(rig.driver.event_elapsed_ms(start, plain).is_err());
    }

    /// A stream may wait for an event of another device.
    fn a_wait_crosses_devices(rig) {
        let producer = rig.stream();
        let event = rig.event();
        let ptr = rig.words(4, 0);
        rig.hold(producer);
        rig.fill(ptr, 4, 1, producer);
        rig.driver.event_record(event, producer).unwrap();
        rig.peer.bind().unwrap();
        let consumer = rig.peer.stream_create(0).unwrap();
        rig.peer.stream_wait_event(consumer, event).unwrap();
        let done = rig.peer.event_create(false).unwrap();
        rig.peer.event_record(done, consumer).unwrap();
        assert!(!rig.peer.event_query(done).unwrap());
        rig.open();
        rig.peer.event_synchronize(done).unwrap();
        rig.driver.bind().unwrap();
        assert!(rig.driver.event_query(event).unwrap());
        assert_eq!(rig.read(ptr, 4), [1; 4]);
    }
}
