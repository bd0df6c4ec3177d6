// Which instruction-set level runs on this processor.
#pragma once
#include "model.h"

namespace aiocb {

const Level* find_level(const char* name);  // null: the best; returns null where there is no such level
bool has_vnni();

}  // namespace aiocb
