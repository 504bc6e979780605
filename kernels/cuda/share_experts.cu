#include "common.cuh"

// Splits a token's experts between the device, which keeps those with a slot, and the host. One warp: a lane for each of the chosen.
EVG_KERNEL(share_experts, EVG_BOUNDS(32))(const int* ids, const float* weights, u32 used, const int* at, int* counts, u32 experts, u32 slots,
    int* device_ids, float* device_weights, int* places, int* fetched, u32 fetches, int* host_ids, float* host_weights) {
    evg_begin();
    const u32 lane = lane_id(), below = (1u << lane) - 1;
    const bool mine = lane < used;
    int id = 0, slot = -1, count = 0;
    float weight = 0.0f;
    if (mine) {
        id = ids[lane];
        weight = weights[lane];
        if (u32(id) >= experts) evg_fault("expert id out of range");
        slot = at[id];
        if (slot != -1 && u32(slot) >= slots) evg_fault("slot of an expert out of range");
        count = counts[id];
    }
    // Kept ones first; others as long as the device has too few.
    const u32 kept = __ballot_sync(FULL_WARP, mine && slot >= 0), others = __ballot_sync(FULL_WARP, mine && slot < 0);
    const u32 wanted = u32(__popc(kept)) < fetches ? fetches - u32(__popc(kept)) : 0;
    const u32 number = u32(__popc(others & below));
    const bool fetch = mine && slot < 0 && number < wanted, here = mine && (slot >= 0 || fetch);
    const u32 ours = __ballot_sync(FULL_WARP, here), theirs = __ballot_sync(FULL_WARP, mine && !here);
    const u32 coming = u32(__popc(__ballot_sync(FULL_WARP, fetch)));
    if (lane < fetches && lane >= coming) fetched[lane] = -1;
    if (!mine) return;
    counts[id] = count + 1;
    if (fetch) fetched[number] = id;
    if (here) {
        const u32 place = u32(__popc(ours & below));
        device_ids[place] = id;
        device_weights[place] = weight;
        places[place] = fetch ? int(number) : int(fetches + u32(slot));
    } else {
        const u32 place = u32(__popc(theirs & below));
        host_ids[place] = id;
        host_weights[place] = weight;
    }
    if (lane >= u32(__popc(ours))) {
        device_ids[lane] = -1;
        device_weights[lane] = 0.0f;
        places[lane] = -1;
    }
    if (lane >= u32(__popc(theirs))) {
        host_ids[lane] = -1;
        host_weights[lane] = 0.0f;
    }
}
