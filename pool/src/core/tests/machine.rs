//! Random long walks against a naive model of intervals.
