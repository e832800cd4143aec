// Four warps that gather tiles of 64 rows, and rows of u beside them: eight threads a line of a row, sixteen rows at a time. What is
// no row or no column becomes zeros. Consumers fence for themselves.
#pragma once
#include <hexa_fx/kernels/low_rank_smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>
#include <hexa_fx/types/element.cuh>

namespace hexa::sm90 {

template <class C>
struct LowRankGatherer {
  static constexpr int kPiece = C::Element::kPiece;
  LowRankSmem<C>& sm;
  const LowRankParams& p;
  Pipe pipe, at_u;

  CUTE_DEVICE void run() {
    constexpr int kPasses = kRunRows / 16;
    const int r = threadIdx.x >> 3, c = threadIdx.x & 7;
    const uint32_t first = cast_smem_ptr_to_uint(sm.rows[0][0]) + swizzled(r, c), pieces = p.stride / kPiece;
    for (Run<C::MaxExperts> at(sm.table, p.experts); !at.done(); at.next()) {
      const int row0 = at.row0(), rows = at.rows();
      uint32_t from[kPasses];  // in 16 bytes
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        const uint32_t own = row0 + min(r + 16 * i, rows - 1);
        from[i] = (C::Gather ? __umulhi(2u * uint32_t(__ldg(p.v + own)), p.div_mul) >> p.div_shift : own) * pieces + c;
      }
#pragma unroll 1
      for (int k = 0; k < C::Steps; ++k) {
        Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
        const uint32_t dst = opaque(first + pipe.index * (2 * C::HalfBytes));
        const int columns = p.columns - k * 128 - c * kPiece;
        CUTE_UNROLL
        for (int i = 0; i < kPasses; ++i) {
          const char* row = static_cast<const char*>(p.rows) + size_t(from[i]) * kPieceBytes;
          const uint32_t to = dst + i * (16 * kLineBytes);
          cp_async_16(to, row, r + 16 * i < rows && columns > 0 ? kPieceBytes : 0);
          cp_async_16(to + C::HalfBytes, row + kLineBytes, r + 16 * i < rows && columns > 64 ? kPieceBytes : 0);
          from[i] += 2 * kLineBytes / kPieceBytes;
        }
        if (C::Sums && k == 0) rows_of_u(row0, rows);
        cutlass::arch::cpasync_barrier_arrive_noinc(&sm.full[pipe.index]);
        pipe.template next<C::Stages>();
      }
      at_u.template next<C::Slots>();
    }
    cp_async_wait_all();
  }

  CUTE_DEVICE void rows_of_u(int row0, int rows) {
    constexpr int kPieces = C::Pitch / kPieceBytes;  // a row
    const char* u = static_cast<const char*>(p.u) + C::Element::bytes(size_t(row0) * p.R);
#pragma unroll 1
    for (int at = threadIdx.x; at < kRunRows * kPieces; at += 128) {
      const int row = at / kPieces, piece = at % kPieces;
      const bool inside = row < rows && piece * kPiece < p.R;
      const char* from = u + (inside ? row * (p.R / kPiece) + piece : 0) * kPieceBytes;
      uint8_t* to = sm.u[at_u.index] + row * C::Pitch + ((piece ^ (row * C::Pitch / kLineBytes & (kPieces - 1))) << 4);
      if constexpr (is_same_v<typename C::W, void>) cp_async_16(cast_smem_ptr_to_uint(to), from, inside ? kPieceBytes : 0);
      else *reinterpret_cast<uint4*>(to) = inside ? weighted(from, row0 + row) : uint4{};
    }
    if constexpr (is_same_v<typename C::W, void>) cutlass::arch::cpasync_barrier_arrive_noinc(&sm.u_full[at_u.index]);
    else Barrier::arrive(&sm.u_full[at_u.index]);
  }
  // Rounded as a product of tensors is.
  CUTE_DEVICE uint4 weighted(const char* from, int row) {
    using T = typename C::T;
    const float w = widen(__ldg(static_cast<const typename C::W*>(p.weights) + __ldg(p.v + row)));
    uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    uint32_t* word = reinterpret_cast<uint32_t*>(&x);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) word[i] = pack<T>(low<T>(word[i]) * w, high<T>(word[i]) * w);
    return x;
  }
};

}  // namespace hexa::sm90
