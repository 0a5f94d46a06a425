// The CPU kernels that bring a mini-batch's features together. The caller shares out [begin, end).
#pragma once
#include "../fetch.h"

namespace pyg_fast::cpu {

// First positions of `previous`, then, once all are noted, rows of the result.
void note_previous(const Match& p, int64_t begin, int64_t end);
void match(const Match& p, int64_t begin, int64_t end);

// Positions of p.ids.
void match_degree(const MatchDegree& p, int64_t begin, int64_t end);

void fetch_rows(const FetchRows& p, int64_t begin, int64_t end);

}  // namespace pyg_fast::cpu
