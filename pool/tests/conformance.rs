//! The driver's rules, told over every body that needs no hardware.

evergraph_pool::driver_conformance!(threads, Body::Threads);
evergraph_pool::driver_conformance!(stepped, Body::Stepped);
evergraph_pool::driver_conformance!(faulty, Body::Faulty);
